"""Starts gathers of updated parameters between the reductions of gradients, as each becomes possible.

Before and after, with two buckets::

    scatter 0; backward; scatter 1                   scatter 0; backward
    update 0; update 1                      ->       update 0; gather 0; backward; scatter 1
    gather 0; gather 1                               update 1; gather 1

Collectives start in one order, which is the same on every rank and which the scheduler keeps. As written, all gathers
stand after the last reduction, and would have nothing to hide behind.

Before the optimizer is split by bucket, every gather needs all reductions.

[Note: how early]
A gather can start when the last reduction that it needs is over. It goes before the first reduction after that
one which would not have to wait for it, by predicted times. Those that fit nowhere stay at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import torch.fx as fx

from wholestep.cost.cost_model import CostModel
from wholestep.ir import graph_edit, node_meta, op_info
from wholestep.ir.node_meta import BucketKind
from wholestep.ir.program import Program
from wholestep.passes.analysis.task_graph import comm_us, sharing
from wholestep.passes.comm.gather_buckets import needed_since


def start_gathers_early(program: Program, *, cost: CostModel, hold_updates: bool = False) -> Program:
    """The program, with gathers that nothing in it uses put before reductions that need not wait for them.

    `cost`: predicted times; the same on every rank. `hold_updates`: inputs are written after the last collective, so
    all gathers stay at the end. A program without such gathers is left as it is.
    """
    nodes = list(program.graph.nodes)
    starts = [node for node in nodes if op_info.is_collective(node)]
    reductions = [node for node in starts if node_meta.brings_gradients(node)]
    behind_all = starts[starts.index(reductions[-1]) :] if reductions else []
    gathers = [node for node in behind_all if _brings_updates(node)]
    if hold_updates or not gathers or not reductions:
        return program
    needs = {node: _last_needed(node, reductions) for node in gathers}
    moved = 0
    for reduction, early in _in_front(reductions, gathers, needs, _ready_us(program, cost), _Link(program, cost)):
        for gather in early:
            order = graph_edit.positions(program.graph)
            needed = needed_since(gather, reduction, order)
            for one in sorted((*needed, gather), key=order.__getitem__):
                reduction.prepend(one)
            moved += 1
    return program.with_notes(
        f"{moved} of {len(gathers)} gathers of updated parameters start before the last reduction"
    )


def _brings_updates(node: fx.Node) -> bool:
    record = node_meta.bucket(node)
    return record is not None and record.kind is BucketKind.GATHER and record.phase not in node_meta.COMPUTING_PHASES


def _last_needed(gather: fx.Node, reductions: Sequence[fx.Node]) -> int:
    """The last reduction that a gather depends on, by its place; -1 for none.

    One after all of them where it depends on a call that keeps its order, such as a draw of random numbers.
    """
    places = {node: place for place, node in enumerate(reductions)}
    seen, stack, last = {gather}, [gather], -1
    while stack:
        for arg in stack.pop().all_input_nodes:
            last = max(last, places.get(arg, -1))
            if arg.op == "call_function" and not op_info.is_collective(arg) and op_info.has_effect(arg.target):
                return len(reductions)
            if arg not in seen and arg not in places:
                seen.add(arg)
                stack.append(arg)
    return last


def _ready_us(program: Program, cost: CostModel) -> dict[fx.Node, float]:
    """When each collective stands in the computation."""
    nodes = list(program.graph.nodes)
    times_us, clock_us, found = cost.times_us(nodes), 0.0, dict[fx.Node, float]()
    for node in nodes:
        if op_info.is_collective(node):
            found[node] = clock_us
        elif node.op == "call_function":
            clock_us += times_us[node]
    return found


class _Link:
    """The one link that all collectives use, one after another."""

    def __init__(self, program: Program, cost: CostModel) -> None:
        self._cost, self._ranks = cost, {axis.group: axis.size for axis in program.mesh}
        self._factor = sharing(cost).collective
        self._free_us = 0.0

    def end_us(self, node: fx.Node, ready_us: float) -> float:
        """When a collective is over that starts as soon as it is ready and the link is free."""
        return max(self._free_us, ready_us) + self._factor * comm_us(node, self._cost, self._ranks)

    def run(self, node: fx.Node, ready_us: float) -> float:
        """The same, and the link is not free before."""
        self._free_us = self.end_us(node, ready_us)
        return self._free_us


def _in_front(
    reductions: Sequence[fx.Node],
    gathers: Sequence[fx.Node],
    needs: Mapping[fx.Node, int],
    ready_us: Mapping[fx.Node, float],
    link: _Link,
) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """Each reduction with the gathers that go before it, in their order."""
    waiting, over_us = deque(one for one in gathers if needs[one] < len(reductions)), [0.0] * len(reductions)
    for place, reduction in enumerate(reductions):
        early: list[fx.Node] = []
        while waiting and (last := needs[waiting[0]]) < place:
            possible_us = over_us[last] if last >= 0 else 0.0
            if link.end_us(waiting[0], possible_us) > ready_us[reduction]:
                break
            link.run(waiting[0], possible_us)
            early.append(waiting.popleft())
        over_us[place] = link.run(reduction, ready_us[reduction])
        yield reduction, early
