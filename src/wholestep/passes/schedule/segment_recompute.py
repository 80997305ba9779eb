"""Recomputes cheap values inside of backward segments instead of reading them.

What a forward segment gives a backward one is written to memory and read from it. Where calls that go number by number
lead to it from something that is there anyway, the reader does them again on its way::

    pre = addmm(...)                                     pre = addmm(...)
    inner = tanh(0.8 * (pre + 0.04 * pre ** 3))          hidden = 0.5 * pre * (1 + tanh(...))
    hidden = 0.5 * pre * (1 + inner)               ->    ...
    ...                                                  grad_pre = grad * f(pre, tanh(0.8 * (pre + 0.04 * pre ** 3)))
    grad_pre = grad * f(pre, inner)

Note: the choice
    A kernel of the backward wants some values of a forward segment. They follow from others: those on a minimum cut
    between what cannot be done again (products, sums, random numbers, arguments) and what is wanted. To read a value
    costs its bytes, and to write it as many, but for what is written anyway: for another reader, or since a library
    gives or takes it. Of cuts that cost the same the one is taken that does least again.

Note: memory
    What lives until the backward does not grow: a kernel may read an argument of the forward segment only where its own
    segment does so anyway, and where less traffic would take more memory everything stays as it is.

Source of the idea: He and Yu, "Transcending Runtime-Memory Tradeoffs in Checkpointing by being Fusion Aware", 2023, the
partitioner of torch.compile, which knows a forward and a backward; here there are many segments, and kernels in them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.fx as fx

from wholestep.ir import graph_edit, node_meta, op_info
from wholestep.ir.node_meta import Region
from wholestep.passes.analysis import users
from wholestep.util.lazy_import import lazy_import

if TYPE_CHECKING:
    import networkx
else:
    networkx = lazy_import("networkx")  # it comes with torch, and takes a while to import

NodePredicate = Callable[[fx.Node], bool]

LEAST_BYTES = 1 << 16
"""That have to be saved for the results of a segment to change."""
_SOURCE, _SINK = "source", "sink"


def recompute_in_segments(
    graph: fx.Graph,
    runs: Sequence[list[fx.Node]],
    *,
    is_pointwise: NodePredicate,
    by_library: NodePredicate,
    fixed: NodePredicate,
) -> tuple[list[list[fx.Node]], int]:
    """The runs with calls repeated where they are read, and the bytes that are saved.

    Args:
        graph: that of the runs, in topological order; the second calls stand before the run that they join.
        runs: nodes that are compiled together, without views, in the order of the graph.
        is_pointwise: whether a kernel that reads what a call gives can compute it on its way.
        by_library: whether a call reads and writes memory whatever stands beside it.
        fixed: whether the run of a node stays as it is.
    """
    runs = [list(run) for run in runs]
    free = [number for number, run in enumerate(runs) if not any(map(fixed, run))]
    place = {node: number for number in free for node in runs[number]}
    late = {number: _Kernels(runs[number], by_library) for number in free if not any(map(_is_forward, runs[number]))}
    saved_bytes = 0
    for number in reversed(free):  # what later ones ask of it is known then
        forward = _ForwardRun(runs[number], place, late, is_pointwise=is_pointwise, by_library=by_library)
        cuts = forward.cuts()
        less_bytes = sum(cut.less_bytes for cut in cuts)
        if less_bytes < LEAST_BYTES or forward.keeps_more(cuts):
            continue
        saved_bytes += less_bytes
        for cut in cuts:
            run, kernel = cut.reader
            recomputed = _Recomputed(graph, cut.recomputed, runs[run][0])
            for node in [node for node in runs[run] if late[run].of[node] == kernel]:
                node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), recomputed)
            runs[run][:0] = recomputed.calls
            place.update(dict.fromkeys(recomputed.calls, run))
            late[run].of.update(dict.fromkeys(recomputed.calls, kernel))
    if saved_bytes:
        graph_edit.remove_dead_code(graph)  # what the backward alone read
        there = set(graph.nodes)
        runs = [[node for node in run if node in there] for run in runs]
    return runs, saved_bytes


def _is_forward(node: fx.Node) -> bool:
    return node_meta.origin(node).region is Region.FORWARD


def _args(node: fx.Node) -> Iterator[fx.Node]:
    return map(users.base, node.all_input_nodes)


Reader = tuple[int, int]
"""A run, and one of its kernels."""


class _Kernels:
    """The kernels of a run: nodes with equally many library calls before them share one."""

    def __init__(self, run: Sequence[fx.Node], by_library: NodePredicate) -> None:
        self.of: dict[fx.Node, int] = {}
        self.reads = {arg for node in run for arg in _args(node)}
        for node in run:
            self.of[node] = max((self.of.get(arg, 0) for arg in _args(node)), default=0) + by_library(node)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """What a kernel does again, and how many bytes less are written and read for it."""

    reader: Reader
    recomputed: Collection[fx.Node]
    inputs: Collection[fx.Node]
    """What it reads, and computes the rest from."""
    less_bytes: int


class _ForwardRun:
    """A run of the forward: which values late runs read, and which should be kept for them."""

    def __init__(
        self, run: Sequence[fx.Node], place: Mapping[fx.Node, int], late: Mapping[int, _Kernels], *,
        is_pointwise: NodePredicate, by_library: NodePredicate,
    ) -> None:  # fmt: skip
        self._calls, self._late = set(run), late
        self._wanted: dict[Reader, list[fx.Node]] = {}
        self._written = set[fx.Node]()
        """Values that are in memory anyway."""
        self._kept = set[fx.Node]()
        """Those of them that a library of a late run takes."""
        kernels = _Kernels(run, by_library).of
        for node in run:
            readers = [reader for reader, _ in users.readers_through_views(node)]
            outside = [reader for reader in readers if reader not in self._calls]
            is_handed_on = any(kernels.get(reader, kernels[node]) != kernels[node] for reader in readers)
            is_given = any(place.get(reader) not in late for reader in outside)
            if is_handed_on or is_given or by_library(node):
                self._written.add(node)
            if any(map(by_library, outside)):
                self._kept.add(node)
            elif isinstance(node_meta.value(node), torch.Tensor):
                wanting = (
                    (there, late[there].of[reader]) for reader in outside if (there := place.get(reader, -1)) in late
                )
                for one in dict.fromkeys(wanting):
                    self._wanted.setdefault(one, []).append(node)
        self._recomputable = {
            node for node in run if _is_forward(node) and node not in self._kept and is_pointwise(node)
        }

    def cuts(self) -> list[_Cut]:
        """What each kernel recomputes, in order.

        What is kept for one is there for those after it.
        """
        wanted = sorted(self._wanted.items())
        return [self._cut(reader, values) for reader, values in wanted if not self._recomputable.isdisjoint(values)]

    def keeps_more(self, cuts: Sequence[_Cut]) -> bool:
        """Whether these take more memory until the backward than there was."""
        before = {node for values in self._wanted.values() for node in values} | self._kept
        changed = {cut.reader: cut for cut in cuts}
        after = set(self._kept)
        for reader, values in self._wanted.items():
            after.update(changed[reader].inputs if reader in changed else values)
        return sum(map(node_meta.num_bytes, after & self._calls)) > sum(map(node_meta.num_bytes, before))

    def _traffic_bytes(self, node: fx.Node, reader: Reader) -> float:
        """Bytes that are written and read if a kernel takes the value."""
        lives_longer = node not in self._calls and node not in self._late[reader[0]].reads
        if lives_longer or not isinstance(node_meta.value(node), torch.Tensor):
            return float("inf")
        is_there = node not in self._calls or node in self._kept or node in self._written
        return node_meta.num_bytes(node) * (1 if is_there else 2)

    def _cut(self, reader: Reader, wanted: Sequence[fx.Node]) -> _Cut:
        flow = networkx.DiGraph()
        flow.add_nodes_from((_SOURCE, _SINK))
        flow.add_edges_from((f"{node.name} out", _SINK) for node in wanted)
        prices: dict[fx.Node, float] = {}
        todo = list(wanted)
        while todo:
            node = todo.pop()
            if node in prices:
                continue
            prices[node] = self._traffic_bytes(node, reader)
            flow.add_edge(f"{node.name} in", f"{node.name} out", capacity=prices[node])
            if node not in self._recomputable:
                flow.add_edge(_SOURCE, f"{node.name} in")
                continue
            for arg in _args(node):
                flow.add_edge(f"{arg.name} out", f"{node.name} in")
                todo.append(arg)
        least, (reached, _) = networkx.minimum_cut(flow, _SOURCE, _SINK)
        recomputed = {node for node in prices if f"{node.name} in" not in reached}
        inputs = {node for node in prices if node not in recomputed and f"{node.name} out" not in reached}
        self._written |= inputs
        return _Cut(
            reader=reader,
            recomputed=recomputed,
            inputs=inputs,
            less_bytes=int(sum(prices[node] for node in wanted) - least),
        )


class _Recomputed:
    """Repeats calls for the kernel that reads them; maps each node to its copy."""

    def __init__(self, graph: fx.Graph, recomputed: Collection[fx.Node], first: fx.Node) -> None:
        """`first`: what the new calls stand before."""
        self._graph, self._recomputable, self._first = graph, recomputed, first
        self._twins: dict[fx.Node, fx.Node] = {}
        self.calls: list[fx.Node] = []
        """Those that are no views, in order."""

    def __call__(self, node: fx.Node) -> fx.Node:
        if users.base(node) not in self._recomputable:
            return node
        if node not in self._twins:
            args, kwargs = fx.map_arg((node.args, node.kwargs), self)
            with self._graph.inserting_before(self._first):
                twin = self._graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
            node_meta.copy_meta(node, twin)
            node_meta.set_origin(twin, replace(node_meta.origin(node), region=Region.RECOMPUTE))
            self._twins[node] = twin
            if not op_info.is_view(node):
                self.calls.append(twin)
        return self._twins[node]
