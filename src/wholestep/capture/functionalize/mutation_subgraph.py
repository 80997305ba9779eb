"""The subgraph of a trace that writes concern, and how its functional form is spliced back.

[Note: what is written to, and what is not]
Making a graph functional changes calls that write and calls that see what was written, and no others. So only those are
traced again, as a graph of their own; the others are copied with their values, which takes a tenth of the time. Nodes
that may share memory form a group, as schemas say. A call is in the part if it touches a group after the first write
to it. Where the part would have to know how values that were made outside share memory, all calls that touch their
group are in it. Numbers of the host stay together with what they are made of, since they are followed by value.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from wholestep.ir import graph_edit, node_meta, op_info
from wholestep.ir.lazy_graph_module import module_of

_DECLARES = ("aten", "prims", "wholestep", "wholestep_functional")
"""Namespaces whose schemas say what results share memory with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MutationSubgraph:
    """Calls of a graph as a graph of their own."""

    module: fx.GraphModule
    """Placeholders are those of the whole, then `entering`. Returns a list, the last values of `leaving`."""
    entering: list[fx.Node]
    """Nodes of the whole that it reads."""
    leaving: list[fx.Node]
    """Nodes of the whole that are read outside of it, and results that it writes to or makes."""
    stands_for: dict[fx.Node, fx.Node]
    """Its calls -> those of the whole."""


def mutation_subgraph(traced: fx.GraphModule) -> MutationSubgraph:
    """What of `traced` has to be made functional. `traced` stays as it is."""
    touched = _TouchedCalls(traced.graph)
    inside, results = touched.calls, touched.results()
    calls = [node for node in traced.graph.nodes if node in inside]
    read = [arg for node in calls for arg in node.all_input_nodes]
    entering = dict.fromkeys(one for one in (*read, *results) if one not in inside and one.op != "placeholder")
    outside = (node for node in traced.graph.nodes if node not in inside and node.op != "output")
    leaving = dict.fromkeys(arg for node in outside for arg in node.all_input_nodes if arg in inside)
    leaving.update(dict.fromkeys(results))
    graph, copies, stands_for = fx.Graph(), dict[fx.Node, fx.Node](), dict[fx.Node, fx.Node]()
    for node in (*traced.graph.find_nodes(op="placeholder"), *entering):
        copies[node] = graph.placeholder(node.name)
        node_meta.copy_meta(node, copies[node])
    for node in calls:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        stands_for[copies[node]] = node
    graph.output([copies[node] for node in leaving])
    return MutationSubgraph(
        module=module_of(traced, graph), entering=list(entering), leaving=list(leaving), stands_for=stands_for
    )  # fmt: skip


def splice(
    traced: fx.GraphModule,
    subgraph: MutationSubgraph,
    functional: fx.GraphModule,
    made_for: Callable[[fx.Node], fx.Node | None],
) -> fx.GraphModule:
    """`traced` with the functional form of `subgraph` in the place of its calls, which are named as a trace names them.

    Args:
        whole: as `mutation_subgraph` was given it.
        part: what `mutation_subgraph` gave.
        functional: the part made functional, with the same placeholders and results.
        made_for: a node of `functional` -> the call of the part for which it was made; None after the last call.
    """
    own, inputs = traced.graph.find_nodes(op="placeholder"), functional.graph.find_nodes(op="placeholder")
    enters = dict(zip(subgraph.entering, inputs[len(own) :], strict=True))
    _drop_writes(functional.graph, set(enters.values()))
    gives: Any = dict(zip(subgraph.leaving, functional.graph.output_node().args[0], strict=True))  # type: ignore[arg-type]
    made: dict[fx.Node | None, list[fx.Node]] = {}
    for node in functional.graph.nodes:
        if node.op not in ("placeholder", "output"):
            call = made_for(node)
            made.setdefault(subgraph.stands_for.get(call) if call is not None else None, []).append(node)
    inside, graph = set(subgraph.stands_for.values()), fx.Graph()
    new, moved = dict[fx.Node, fx.Node](), dict[fx.Node, fx.Node]()
    for old, node in zip(own, inputs, strict=False):
        new[old] = moved[node] = graph.placeholder(node.name)
        node_meta.copy_meta(node, new[old])
    for old in traced.graph.nodes:
        if old in inside:
            for node in made.get(old, ()):
                moved[node] = named_copy(graph, node, moved.__getitem__)
        elif old.op not in ("placeholder", "output"):
            new[old] = named_copy(graph, old, lambda arg: new[arg] if arg in new else moved[gives[arg]])
        if old in enters:
            moved[enters[old]] = new[old]
    for node in made.get(None, ()):
        moved[node] = named_copy(graph, node, moved.__getitem__)
    results = traced.graph.output_node().args[0]
    graph.output(fx.map_arg(results, lambda one: moved[gives[one]] if one in gives else new[one]))
    return module_of(functional, graph)


def _drop_writes(graph: fx.Graph, entering: set[fx.Node]) -> None:
    """What functionalization writes back to its arguments; those that no input of the whole is nobody sees again."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        if node.args[0] in entering:
            graph_edit.replace_node(node, node.args[1])


def named_copy(graph: fx.Graph, node: fx.Node, new: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """A copy of the node at the end of a graph, named as a trace names it.

    `new` gives its arguments.
    """
    if node.op == "get_attr":
        copy = graph.node_copy(node, new)
    else:
        args, kwargs = fx.map_arg(_explicit_args(node), new)
        target: Any = node.target
        name = target._schema.name.split("::")[1] if op_info.is_op(node) else re.sub(r"_\d+$", "", node.name)
        copy = graph.create_node(node.op, node.target, args, kwargs, name)
    copy.meta = node_meta.portable(node)
    return copy


def _explicit_args(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call without trailing and keyword None that are defaults."""
    if not op_info.is_op(node):
        return node.args, node.kwargs
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    plain = {arg.name for arg in arguments if arg.has_default_value() and arg.default_value is None}
    args = list(node.args)
    while args and args[-1] is None and arguments[len(args) - 1].name in plain:
        args.pop()
    return tuple(args), {name: arg for name, arg in node.kwargs.items() if arg is not None or name not in plain}


class AliasGroups:
    """Which nodes of a graph may share memory, and which memory is written to."""

    def __init__(self, graph: fx.Graph, *, separate_items: bool = False) -> None:
        """`separate_items`: whether tensors of a list, each in its own memory, are groups each."""
        self._parent: dict[fx.Node, fx.Node] = {}
        self.written: dict[fx.Node, int] = {}
        """Group -> place of the first write."""
        self.bases: dict[fx.Node, list[fx.Node]] = {}
        """Group -> nodes that share memory with no node before them."""
        alone, items, lists = [], dict[tuple[fx.Node, Any], fx.Node](), set[fx.Node]()
        for node in graph.nodes:
            shared = list(shares_with(node))
            if separate_items and node.target is operator.getitem and shared[0] in lists:
                shared = [first] if (first := items.setdefault(node.args, node)) is not node else []
            if not shared and all(user.target is operator.getitem for user in node.users):
                lists.add(node)  # if it gives one: new tensors, or lists of them, of which only items are read
            for source in shared:
                self._parent[self.of(node)] = self.of(source)
            if not shared:
                alone.append(node)
        for node in alone:
            self.bases.setdefault(self.of(node), []).append(node)
        for place, node in enumerate(graph.nodes):
            for target in writes_to(node):
                self.written.setdefault(self.of(target), place)

    def of(self, node: fx.Node) -> fx.Node:
        """The group of a node, by the name of one of its members."""
        while (parent := self._parent.get(node, node)) is not node:
            self._parent[node] = self._parent.get(parent, parent)
            node = parent
        return node


class _TouchedCalls:
    """Which calls of a graph are in the part."""

    def __init__(self, graph: fx.Graph) -> None:
        self._nodes = list(graph.nodes)
        self._returned = graph.output_node().all_input_nodes
        groups = AliasGroups(graph)
        self._group, self._written, self._bases = groups.of, groups.written, groups.bases
        self.calls = self._numbers() | {node for node in self._nodes if is_new(node)}
        self._included = {group for group in self._written if len(self._bases.get(group, ())) != 1}
        """Groups of which every call is in the part."""
        for node in self._nodes:
            if (
                op_info.is_op(node) and torch.Tag.inplace_view in node.target.tags
            ):  # ``t_()``: another shape from here on
                self._included.add(self._group(node))
        while self._grow():
            pass

    def results(self) -> list[fx.Node]:
        """Results that the part makes or writes to."""
        return [one for one in self._returned if one in self.calls or self._group(one) in self._written]

    def _numbers(self) -> set[fx.Node]:
        """Numbers and constants, what they are made of, and their readers."""
        followed = [n for n in self._nodes if n.op == "get_attr" or (n.op == "call_function" and _is_number(n))]
        readers = {user for node in followed for user in node.users if user.op != "output"}
        made_of: set[fx.Node] = set()
        while followed:
            node = followed.pop()
            if node not in made_of and node.op != "placeholder":
                made_of.add(node)
                followed += node.all_input_nodes
        return readers | made_of

    def _grow(self) -> bool:
        """Takes in what touches groups; whether there may be more."""
        before = len(self._included), len(self.calls)
        for place, node in enumerate(self._nodes):
            if node.op in ("placeholder", "output") or node in self.calls:
                continue
            # A view of what the part makes: both would have memory of their own else.
            follows = any(source in self.calls for source in shares_with(node))
            if follows or any(self._concerns(self._group(one), place) for one in (node, *node.all_input_nodes)):
                self.calls.add(node)
        for node in [one for one in self.calls if one.target is operator.getitem]:
            self.calls.update(node.all_input_nodes)
        self._included.update(self._split_groups())
        return before != (len(self._included), len(self.calls))

    def _concerns(self, group: fx.Node, place: int) -> bool:
        """Whether a call at `place` that touches `group` belongs to the part."""
        return group in self._included or (group in self._written and place >= self._written[group])

    def _split_groups(self) -> Iterable[fx.Node]:
        """Written groups of which more than the base would cross the subgraph's border."""
        read = [one for node in self.calls for one in node.all_input_nodes]
        for one in (*read, *self._returned):
            group = self._group(one)
            if one not in self.calls and group in self._written and one not in self._bases[group]:
                yield group
        for node in self.calls:
            is_read = any(user not in self.calls and user.op != "output" for user in node.users)
            if is_read and self._group(node) in self._written:
                yield self._group(node)


def shares_with(node: fx.Node) -> Iterable[fx.Node]:
    """Arguments with which the results of a call may share memory."""
    if node.op != "call_function":
        return ()
    if op_info.is_op(node) and node.target.namespace not in _DECLARES:  # type: ignore[union-attr]
        return node.all_input_nodes
    return op_info.argument_nodes(node, op_info.viewed_args(node.target))


def writes_to(node: fx.Node) -> Iterable[fx.Node]:
    """Arguments that a call writes to."""
    if node.target in (op_info.RESIZE_STORAGE, op_info.SET_VERSION):
        return node.all_input_nodes
    return op_info.argument_nodes(node, op_info.mutated_args(node.target))


def _is_number(node: fx.Node) -> bool:
    return not isinstance(node_meta.value(node), (torch.Tensor, list, tuple, type(None)))


def is_new(node: fx.Node) -> bool:
    """Whether the call was put into the graph after the trace."""
    if node.op != "call_function" or not op_info.is_op(node):
        return node.op == "call_function" and node_meta.value(node) is None
    schema = node.target._schema  # type: ignore[union-attr]
    return schema.name.startswith("wholestep_functional::") or (node_meta.value(node) is None and bool(schema.returns))
