"""Drops what does no work: profiler marks, views of views that lead back, dead code.

What a fold removes is a second name of a value, or a copy whose place nobody looks at before the write.
Before and after::

    t = aten.t.default(w)                    mm = aten.mm.default(x, w)
    t_1 = aten.t.default(t)            ->
    mm = aten.mm.default(x, t_1)

Random operators, effects, collectives and clones stay.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
import torch.fx as fx

from wholestep.ir import graph_edit, node_meta, op_info
from wholestep.ir.program import OutputKind, Program
from wholestep.ir.sizes import are_same
from wholestep.passes.analysis.alias_analysis import same_layout, same_place

_aten = torch.ops.aten

# Views that only rename a place in memory: where two of them name the same place, they are the same value.
_VIEWS = frozenset({
    _aten.alias.default, _aten.detach.default, _aten.lift_fresh.default, _aten.view.default, _aten._unsafe_view.default,
    _aten.reshape.default, _aten.t.default, _aten.transpose.int, _aten.permute.default, _aten.expand.default,
    _aten.unsqueeze.default, _aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.slice.Tensor,
    _aten.select.int,
})  # fmt: skip


def eliminate_dead_code(program: Program) -> Program:
    """The program without profiler marks, needless views and dead code."""
    graph = program.graph
    marks = _strip_profiler(graph)
    views = _fold_views(program)
    copies = _fold_copies(program)
    _fold_items_of_literals(graph)
    _write_numbers_out(program)
    dead = graph_edit.remove_dead_code(graph)
    return program.with_notes(
        f"dropped {marks} profiler marks, {views} views and {copies} copies of what was there, {dead} dead nodes"
    )


def _strip_profiler(graph: fx.Graph) -> int:
    marks = [node for node in graph.nodes if node.op == "call_function" and op_info.is_profiler(node.target)]
    for node in reversed(marks):
        graph.erase_node(node)
    return len(marks)


def _fold_views(program: Program) -> int:
    """Replaces a view by the first value up its chain of views that is the same place in memory."""
    return _fold(program, _original)


def _fold_copies(program: Program) -> int:
    """``copy(old, new)``, which functionalisation makes of ``old.copy_(new)``, is `new` if it casts nothing."""
    return _fold(program, _copied)


def _fold(program: Program, find: Callable[[fx.Node], fx.Node | None]) -> int:
    """Replaces nodes by the value that `find` gives for them. Gives how many were replaced."""
    folded: dict[fx.Node, fx.Node] = {}
    pairs = zip(program.results, program.outputs, strict=True)
    returned = {result for result, output in pairs if output.kind is not OutputKind.WRITE}
    for node in list(program.graph.nodes):
        original = find(node)
        original = folded.get(original, original) if original is not None else None
        # What is returned must stay a tensor of its own: not the caller's parameter, not another result.
        if original is None or (node in returned and (original in returned or original.op != "call_function")):
            continue
        if node in returned:
            returned.add(original)
        folded[node] = original
    graph_edit.replace_nodes(folded)
    return len(folded)


def _copied(node: fx.Node) -> fx.Node | None:
    if node.target is not _aten.copy.default:
        return None
    old, new = node.args[:2]
    if not isinstance(old, fx.Node) or not isinstance(new, fx.Node) or old.target is op_info.RESIZE_STORAGE:
        return None  # what is copied into an input that the step freed and allocated belongs there
    one, other = node_meta.tensor(old), node_meta.tensor(new)
    if all(user.op == "output" for user in node.users):  # the write itself takes any order of memory
        same = are_same(one.shape, other.shape) and (one.dtype, one.device) == (other.dtype, other.device)
        return new if same else None
    return new if same_layout(one, other) else None


def _original(node: fx.Node) -> fx.Node | None:
    """The earliest value that `node` is another name of; None if there is none."""
    if node.target not in _VIEWS or not isinstance(node_meta.value(node), torch.Tensor):
        return None
    found, base = None, node
    while base.target in _VIEWS and isinstance(base.args[0], fx.Node):
        base = base.args[0]
        if isinstance(node_meta.value(base), torch.Tensor) and same_place(
            node_meta.tensor(base), node_meta.tensor(node)
        ):
            found = base
    return found


def _fold_items_of_literals(graph: fx.Graph) -> None:
    """``[a, b][1]`` -> ``b``."""
    folded = {}
    for node in graph.find_nodes(op="call_function", target=operator.getitem):
        items, index = node.args
        if isinstance(items, (list, tuple)) and isinstance(index, int) and isinstance(items[index], fx.Node):
            folded[node] = items[index]
    graph_edit.replace_nodes(folded)


_WITH_NUMBER = {_aten.fill.Tensor: _aten.fill.Scalar, _aten.masked_fill.Tensor: _aten.masked_fill.Scalar}
"""Operators that take a tensor of no dimensions -> their forms that take a number; both write it in the same type."""


def _write_numbers_out(program: Program) -> None:
    """``x[0] = 2`` fills with a tensor on the CPU that holds 2, copied afresh in every call: with 2 instead.

    A GPU would read it from the host, which no CUDA graph does.
    """
    for copy in program.graph.find_nodes(op="call_function", target=_aten.lift_fresh_copy.default):
        held = getattr(program.module, str(copy.args[0].target), None) if copy.args[0].op == "get_attr" else None
        if not isinstance(held, torch.Tensor) or held.ndim > 0 or held.device.type != "cpu":
            continue
        for user in list(copy.users):
            if user.target in _WITH_NUMBER and user.args[-1] is copy and not user.kwargs:
                user.args = (*user.args[:-1], held.item())
                user.target = _WITH_NUMBER[user.target]
