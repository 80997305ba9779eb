"""Makes a graph functional without a second trace, where tensors are written as a whole.

What an optimizer does to parameters and state is of this kind, and in most steps nothing else writes::

    mul_ = aten.mul_.Tensor(exp_avg, 0.9)               mul = aten.mul.Tensor(exp_avg, 0.9)
    aten._foreach_add_.Scalar([p, q], 1)          ->    _foreach_add = aten._foreach_add.Scalar([p, q], 1)
    aten.copy_.default(mean, mul_)                      copy = aten.copy.default(mean, mul)

Every call is copied as it is, or as its functional form, whose value alone is computed anew; so names and numbers of
the host stay. The result is the graph that `torch.func.functionalize` would give, but for the order of items of lists.
What it takes: after the first write to memory nobody sees it but as a whole; and all writes are operators of ATen in
place that have a functional form of the same signature and layout, and draw nothing. Steps that resize storages are not
of this kind.
"""

from __future__ import annotations

import operator
from functools import cache
from typing import Any

import torch
import torch.fx as fx

from wholestep.capture.functionalize.mutation_subgraph import AliasGroups, is_new, named_copy, shares_with, writes_to
from wholestep.capture.functionalize.storage_resize import gives_memory
from wholestep.capture.python.user_frame import ASKS_FOR_A_NUMBER
from wholestep.ir import graph_edit, node_meta, op_info
from wholestep.ir.lazy_graph_module import module_of
from wholestep.ir.ops.dispatch_guard import without_autocast

_aten = torch.ops.aten


@cache
def _functional_form(op: Any) -> Any:
    """The operator of ATen that computes what `op` writes to its first argument; None if there is none like it:
    ``pow_.Scalar`` is a tensor to the power of a number, and ``pow.Scalar`` a number to the power of a tensor."""
    if not isinstance(op, torch._ops.OpOverload) or op.namespace != "aten" or op_info.mutated_args(op) != (0,):
        return None
    if torch.Tag.nondeterministic_seeded in op.tags or torch.Tag.inplace_view in op.tags:
        return None
    name = op._schema.name.removeprefix("aten::")
    packet = getattr(_aten, name[:-1], None) if name.endswith("_") else None
    form = getattr(packet, op._overloadname, None)
    if form is None or op_info.mutated_args(form) or op_info.viewed_args(form):
        return None
    own, other = ([(one.name, str(one.type)) for one in each._schema.arguments] for each in (op, form))
    return form if own == other else None


def _whole_writes(traced: fx.GraphModule) -> AliasGroups | None:
    """The groups of a graph that is taken; None for another one."""
    groups = AliasGroups(traced.graph, separate_items=True)
    whole_views = {groups.bases[group][0] for group in groups.written}
    """Nodes that stand for all of their group. Where there may be two, the other one is not among them."""
    for place, node in enumerate(traced.graph.nodes):
        targets = list(writes_to(node))
        if targets and (_functional_form(node.target) is None or len({*map(groups.of, targets)}) < len(targets)):
            return None
        if gives_memory(node):
            return None
        if node.op not in ("call_function", "output"):
            continue
        touched = [one for one in node.all_input_nodes if groups.written.get(groups.of(one), place + 1) <= place]
        if any(one not in whole_views for one in touched):
            return None
        if targets:
            whole_views.add(node)
    return groups


Rewritten = tuple[fx.GraphModule, list[Any], dict[int, fx.Node]]


def to_out_of_place(traced: fx.GraphModule, inputs: list[Any]) -> Rewritten | None:
    """The functional form of a graph, its results, and new values by placeholder written to.

    Args:
        traced: a graph whose calls may write to its inputs; it stays as it is.
        inputs: a fake tensor, or a symbol, per placeholder.

    None for a graph that needs a second trace: where not all is written to as a whole, where a functional form gives
    another layout or type than what is written to, and where one asks for the value of a number of the host.
    """
    if any(map(_is_complex_by_a_number, traced.graph.nodes)) or (groups := _whole_writes(traced)) is None:
        return None
    try:
        with without_autocast():
            return _rewritten(traced, inputs, groups)
    except ASKS_FOR_A_NUMBER:
        return None


def _is_complex_by_a_number(node: fx.Node) -> bool:
    """Whether a call takes complex tensors and a number of the host, whose value it asks for: torch would print pages
    about that."""
    given = node.all_input_nodes
    numbers = any(isinstance(node_meta.value(one), torch.SymFloat) for one in given)
    return numbers and any(tensor.is_complex() for one in given for tensor in node_meta.tensors(one))


def _rewritten(traced: fx.GraphModule, inputs: list[Any], groups: AliasGroups) -> Rewritten | None:
    graph = fx.Graph()
    new = dict[fx.Node, fx.Node]()
    last = dict[fx.Node, fx.Node]()
    """Group -> its value now, once it has been written to."""

    computed = set[fx.Node]()
    """Whose value is another one than in `traced`: so are those of their views."""
    items = dict[tuple[Any, Any], fx.Node]()

    def current(node: fx.Node) -> fx.Node:
        group = groups.of(node)
        return last[group] if group in last else new[node]

    placeholders = traced.graph.find_nodes(op="placeholder")
    for node, value in zip(placeholders, inputs, strict=True):
        new[node] = graph.placeholder(node.name)
        node_meta.set_value(new[node], value)
    for node in traced.graph.nodes:
        targets = list(writes_to(node))
        if node.op in ("placeholder", "output"):
            continue
        if node.target is operator.getitem and (known := items.get((current(node.args[0]), node.args[1]))) is not None:
            new[node] = known
            continue
        new[node] = copied = named_copy(graph, node, current)
        if not targets:
            if is_new(node) or any(current(one) in computed for one in shares_with(node)):
                graph_edit.evaluate(copied)
                computed.add(copied)
            if node.target is operator.getitem:
                items[copied.args[0], copied.args[1]] = copied
            continue
        _make_functional(copied)
        values = _items(graph, copied) if isinstance(node_meta.value(copied), (list, tuple)) else [copied]
        for target, value in zip(targets, values, strict=True):
            if not _is_like(node_meta.value(value), node_meta.value(current(target))):
                return None
            last[groups.of(target)] = value
    results = fx.map_arg(traced.graph.output_node().args[0], current)
    graph.output(results)
    writes = {place: last[groups.of(node)] for place, node in enumerate(placeholders) if groups.of(node) in last}
    return module_of(traced, graph), list(results), writes  # type: ignore[arg-type]


def _make_functional(call: fx.Node) -> None:
    """Replaces a call in place by its functional form, with its value and usual name."""
    call.target = _functional_form(call.target)
    call.name = call.graph._graph_namespace.create_name(call.target._schema.name.removeprefix("aten::"), None)  # type: ignore[union-attr]
    graph_edit.evaluate(call)


def _items(graph: fx.Graph, call: fx.Node) -> list[fx.Node]:
    items = []
    for place, value in enumerate(node_meta.value(call)):
        items.append(graph.create_node("call_function", operator.getitem, (call, place), {}, "getitem"))
        node_meta.set_value(items[-1], value)
        node_meta.set_origin(items[-1], node_meta.origin(call))
    return items


def _is_like(made: torch.Tensor, before: torch.Tensor) -> bool:
    return made.dtype == before.dtype and made.shape == before.shape and made.stride() == before.stride()
