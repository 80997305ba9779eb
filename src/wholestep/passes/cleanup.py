"""Drops what does no work: profiler marks, views of views that lead back, dead code.

Before and after::

    t = aten.t.default(w)                    mm = aten.mm.default(x, w)
    t_1 = aten.t.default(t)            ->
    mm = aten.mm.default(x, t_1)

Random operators, effects, collectives and clones stay.
"""

from __future__ import annotations

import operator

import torch
import torch.fx as fx

from wholestep.passes.alias import same_place
from wholestep.program import edit, meta, ops
from wholestep.program.program import Program

_aten = torch.ops.aten

# Views that only rename a place in memory: where two of them name the same place, they are the same value.
_VIEWS = frozenset({
    _aten.alias.default, _aten.detach.default, _aten.lift_fresh.default, _aten.view.default, _aten._unsafe_view.default,
    _aten.reshape.default, _aten.t.default, _aten.transpose.int, _aten.permute.default, _aten.expand.default,
    _aten.unsqueeze.default, _aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.slice.Tensor,
    _aten.select.int,
})  # fmt: skip


def cleanup(program: Program) -> Program:
    """The program without profiler marks, needless views and dead code."""
    graph = program.graph
    marks = _strip_profiler(graph)
    views = _fold_views(graph)
    _fold_items_of_literals(graph)
    dead = edit.remove_dead_code(graph)
    return program.with_notes(f"dropped {marks} profiler marks, {views} views of what was there, {dead} dead nodes")


def _strip_profiler(graph: fx.Graph) -> int:
    marks = [node for node in graph.nodes if node.op == "call_function" and ops.is_profiler(node.target)]
    for node in reversed(marks):
        graph.erase_node(node)
    return len(marks)


def _fold_views(graph: fx.Graph) -> int:
    """Replaces a view by the first value up its chain of views that is the same place in memory."""
    folded = 0
    returned = set(graph.output_node().all_input_nodes)
    for node in list(graph.nodes):
        original = _original(node)
        # A result must stay a tensor object of its own: not the caller's parameter, not another result.
        if original is None or (node in returned and (original in returned or original.op != "call_function")):
            continue
        if node in returned:
            returned.add(original)
        edit.replace_node(node, original)
        folded += 1
    return folded


def _original(node: fx.Node) -> fx.Node | None:
    """The earliest value that `node` is another name of; None if there is none."""
    if node.target not in _VIEWS or not isinstance(meta.value(node), torch.Tensor):
        return None
    found, base = None, node
    while base.target in _VIEWS and isinstance(base.args[0], fx.Node):
        base = base.args[0]
        if isinstance(meta.value(base), torch.Tensor) and same_place(meta.tensor(base), meta.tensor(node)):
            found = base
    return found


def _fold_items_of_literals(graph: fx.Graph) -> None:
    """``[a, b][1]`` -> ``b``."""
    for node in graph.find_nodes(op="call_function", target=operator.getitem):
        items, index = node.args
        if isinstance(items, (list, tuple)) and isinstance(index, int) and isinstance(items[index], fx.Node):
            edit.replace_node(node, items[index])
