"""The kernels that a compiler makes of a segment, from its nodes alone: nothing is compiled.

Note: what becomes one kernel
    A call of a library (a product, a convolution, attention) stays one. All else is joined with whatever it reads and
    whatever reads it, unless a library stands between the two: nodes are told apart by how many calls of libraries lie
    before them at most. A kernel reads what others have written, each value once, and writes what others read;
    what leads from one of its nodes to the next does not travel. Inductor goes less far: it makes two
    kernels where sums go along different dimensions, which costs little where memory is the bound.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import torch.fx as fx

from wholestep.cost.flops import ROWS, Kind, Work, base_name, memory_bytes, works
from wholestep.ir import node_meta, op_info
from wholestep.ir.segment import Segment

OF_LIBRARIES = frozenset({
    Kind.MATMUL, Kind.CONVOLUTION, Kind.CONVOLUTION_BACKWARD, Kind.ATTENTION, Kind.ATTENTION_BACKWARD
})  # fmt: skip
"""Kinds of work that a compiler leaves to a library."""
OF_MEMORY = frozenset({Kind.POINTWISE, Kind.IN_PLACE, Kind.REDUCTION})
"""Kinds of work that are bound by memory, so that what need not travel is saved."""
OF_HOST = frozenset({Kind.VIEW, Kind.NUMBER})
"""Kinds of work that a device does not see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """A kernel, and the nodes that it is made of."""

    work: Work
    members: tuple[fx.Node, ...]


def kernels(node: fx.Node) -> tuple[Work, ...]:
    """The kernels of a node: those of a segment as a compiler makes them, else as `wholestep.cost.flops.works`."""
    return tuple(_of_segment(node.target)) if isinstance(node.target, Segment) else works(node)


def is_of_host(node: fx.Node) -> bool:
    """Whether a node is work for the host alone."""
    return all(work.kind in OF_HOST for work in works(node))


def source_of(node: fx.Node) -> fx.Node:
    """What a view, or an item of a list, is seen of."""
    while node.op == "call_function" and _is_seen(node):
        node = node.all_input_nodes[0]
    return node


def readers_of(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that read a value, or a view or an item of it; a result of the step is read by the output."""
    for user in node.users:
        if user.op == "call_function" and _is_seen(user):
            yield from readers_of(user)
        else:
            yield user


def _is_seen(node: fx.Node) -> bool:
    return op_info.is_view(node) or node.target is operator.getitem


def _of_segment(segment: Segment) -> Iterator[Work]:
    results = list(segment.graph.output_node().args[0])  # type: ignore[arg-type]
    stored = {results[result] for _, result in segment.stored}
    calls = list(segment.calls)
    kernels_of = fused(calls, joins=lambda node: True, stored=stored)
    alone = set(calls).difference(*(one.members for one in kernels_of))
    yield from (work for node in calls if node in alone for work in works(node) if work.kind not in OF_HOST)
    yield from (one.work for one in kernels_of)


def fused(
    nodes: Sequence[fx.Node],
    *,
    joins: Callable[[fx.Node], bool],
    stored: Set[fx.Node] = frozenset(),
    at_once: Set[fx.Node] = frozenset(),
) -> list[Fused]:
    """The kernels that are made of nodes of a graph, in its order. Calls of libraries are in none.

    Args:
        nodes: in the order of their graph.
        joins: whether the compiler may have a node.
        stored: results that overwrite an argument.
        at_once: nodes that are one kernel without being connected.
    """
    own: dict[fx.Node, tuple[Work, ...]] = {node: works(node) for node in nodes}
    libraries = {node for node, found in own.items() if any(work.kind in OF_LIBRARIES for work in found)}
    joined = [
        node
        for node, found in own.items()
        if node not in libraries and any(work.kind not in OF_HOST for work in found) and joins(node)
    ]
    groups = _groups(joined, _levels(nodes, libraries), at_once)
    return [Fused(work=_kernel({node: own[node] for node in group}, stored), members=tuple(group)) for group in groups]


def _levels(nodes: Iterable[fx.Node], libraries: Set[fx.Node]) -> dict[fx.Node, int]:
    """How many calls of libraries lie on the longest way to each node, itself among them."""
    levels: dict[fx.Node, int] = {}
    for node in nodes:
        levels[node] = max((levels.get(arg, 0) for arg in node.all_input_nodes), default=0) + (node in libraries)
    return levels


def _groups(nodes: Iterable[fx.Node], levels: Mapping[fx.Node, int], at_once: Set[fx.Node]) -> list[list[fx.Node]]:
    """Nodes of a level that are connected, or that are to be one kernel anyway."""
    groups: dict[fx.Node, list[fx.Node]] = {}
    last: fx.Node | None = None
    for node in nodes:
        mine = [node]
        sources = [source for source in map(source_of, node.all_input_nodes) if levels.get(source) == levels[node]]
        if node in at_once:
            sources, last = [*sources, *([last] if last else [])], node
        for source in sources:
            other = groups.get(source)
            if other is not None and other is not mine:
                longer, shorter = (other, mine) if len(other) >= len(mine) else (mine, other)
                longer += shorter
                groups.update(dict.fromkeys(shorter, longer))
                mine = longer
        groups[node] = mine
    return list({id(group): group for group in groups.values()}.values())


def _kernel(members: Mapping[fx.Node, tuple[Work, ...]], stored: Set[fx.Node]) -> Work:
    """One kernel of these nodes with their work."""
    read: dict[fx.Node, int] = {}
    written = {node for node in members if any(reader not in members for reader in readers_of(node))}
    for node in members:
        whole = sum(map(memory_bytes, node_meta.tensors(node)))
        for arg in node.all_input_nodes:
            if source_of(arg) not in members:
                num_bytes = sum(map(memory_bytes, node_meta.tensors(arg)))
                if _picks_rows(node) and arg is node.args[0]:
                    num_bytes = min(num_bytes, whole)
                value = _unviewed(arg)
                read[value] = max(num_bytes, read.get(value, 0))
    num_bytes = sum(read.values()) + sum(sum(map(memory_bytes, node_meta.tensors(node))) for node in written)
    return Work(
        kind=Kind.IN_PLACE if written and written <= stored else Kind.POINTWISE,
        amount=num_bytes,
        num_bytes=num_bytes,
        within=tuple(
            Work(kind=work.kind, amount=work.amount)
            for found in members.values()
            for work in found
            if work.kind not in OF_MEMORY | OF_HOST
        ),
    )


def _unviewed(node: fx.Node) -> fx.Node:
    """What a view is seen of; items of a list are different values."""
    while op_info.is_op(node) and op_info.is_view(node):
        node = node.all_input_nodes[0]
    return node


def _picks_rows(node: fx.Node) -> bool:
    return op_info.is_op(node) and base_name(node.target) in ROWS
