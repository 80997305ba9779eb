"""Orders the whole graph so that computation hides communication.

Before and after, with two buckets::

    backward of layer 2                              backward of layer 2
    backward of layer 1                              all_reduce(bucket 0)
    all_reduce(bucket 0); all_reduce(bucket 1)  ->   backward of layer 1
    wait; wait                                       all_reduce(bucket 1)
    update(layer 2); update(layer 1)                 wait; update(layer 2)       # in the backward, if there is time
                                                     wait; update(layer 1)

`list_scheduler` decides on plain numbers; here the graph becomes numbers and the order a graph again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import NoReturn

import torch.fx as fx

from wholestep.cost.cost_model import CostModel
from wholestep.errors import ConfigError
from wholestep.ir import graph_edit, node_meta, op_info, printer
from wholestep.ir.program import Program
from wholestep.passes.analysis.task_graph import fused_update_ends, sharing, tasks_of
from wholestep.passes.schedule.list_scheduler import list_schedule, reachable_bytes
from wholestep.passes.schedule.ordering_problem import Problem, given_order

SLACK, SLACK_WITH_GATHERS = 0.02, 0.05
"""How much more memory than the order given the schedule may take, if no bound is set. With gathers the order given has
nothing in flight, where a reduction that is in flight keeps its gradients."""


def overlap_communication(
    program: Program, *, cost: CostModel, bound_bytes: int | None = None, hold_updates: bool = False
) -> Program:
    """The program in the fastest predicted order whose live bytes stay within a bound.

    Args:
        cost: predicted times; the same on every rank, so that all find the same order.
        bound_bytes: bound of the bytes that live besides the inputs; None: what the order given needs, plus 2 % (5 % in
            a step with gathers), which can always be kept.
        hold_updates: inputs are written after the last collective.

    Raises:
        ConfigError: for a bound that no order keeps; it names the smallest that one does.

    A program without collectives keeps its order. What has been scheduled before is scheduled anew from the order of
    the step as written, so the result does not depend on how often this is done.
    """
    moves = any(op_info.is_collective(node) for node in program.graph.nodes)
    if not moves and bound_bytes is None:
        return program
    _as_written(program)
    if cost.compiles is not None:
        _bring_together(program, cost.compiles)
    tasks = tasks_of(program, cost, hold_updates=hold_updates)
    problem = Problem(
        tasks=tasks.tasks, late=tasks.late, usages=tasks.usages, joins=tasks.joins, gathers=tasks.gathers,
        pinned=tasks.pinned, writable=tasks.writable, sharing=sharing(cost),
    )  # fmt: skip
    given = given_order(problem)
    slack = SLACK_WITH_GATHERS if problem.gathers else SLACK
    bound = int(given.peak_bytes * (1 + slack)) if bound_bytes is None else bound_bytes
    chosen = list_schedule(problem, bound) if moves else given
    if chosen.peak_bytes > bound:
        _refuse(bound, reachable_bytes(problem, bound) if moves else given.peak_bytes)
    if not moves:
        return program
    for number, node in enumerate(tasks.nodes):
        node_meta.set_position(node, number)
    _move(program, [tasks.nodes[number] for number in chosen.tasks])
    return program.with_notes(
        f"order: {chosen.reason}; predicted {chosen.total_us:.0f} us a step, {chosen.exposed_us:.0f} us of them "
        f"exposed (before: {given.total_us:.0f} and {given.exposed_us:.0f})",
        f"at most {printer.bytes_text(chosen.peak_bytes)} live besides the inputs "
        f"(before: {printer.bytes_text(given.peak_bytes)}; bound: {printer.bytes_text(chosen.bound_bytes)})",
    )


def _refuse(bound_bytes: int, reachable_bytes: int) -> NoReturn:
    raise ConfigError(
        f"bound_bytes={bound_bytes} wants at most {printer.bytes_text(bound_bytes)} besides the inputs of the step. No "
        f"order that was found needs less than {printer.bytes_text(reachable_bytes)} ({reachable_bytes} bytes). Give "
        f"as much, set memory_budget instead, with which values are computed again, or make the batch smaller."
    )


def _as_written(program: Program) -> None:
    """Undoes an earlier schedule; nodes added since stay after the one they follow."""
    nodes = [node for node in program.graph.nodes if node.op not in ("placeholder", "output")]
    if all(node_meta.position(node) is None for node in nodes):
        return
    places, last = {}, -1
    for node in nodes:
        known = node_meta.position(node)
        last = last if known is None else known
        places[node] = last
    _move(program, sorted(nodes, key=lambda node: places[node]))
    graph_edit.sort_topologically(program.graph)


def _bring_together(program: Program, compiles: Callable[[fx.Node], bool]) -> None:
    """Moves the first calls of fused updates right before what reads them."""
    # A decay is written before the gradient is asked for, and would so stand before the wait for it.
    place = {node: number for number, node in enumerate(program.graph.nodes)}
    for node in dict.fromkeys(first for first, _ in fused_update_ends(program, compiles)):
        items = [user for user in node.users if user.target is operator.getitem]
        readers = [user for one in (node, *items) for user in one.users if user not in items]
        first = min(readers, key=place.__getitem__)
        for one in (node, *items):
            first.prepend(one)


def _move(program: Program, nodes: Iterable[fx.Node]) -> None:
    """Puts the nodes in this order, after the inputs."""
    inputs = program.placeholders
    cursor = inputs[-1] if inputs else None
    for node in nodes:
        if cursor is None:
            program.graph.output_node().prepend(node)
        else:
            cursor.append(node)
        cursor = node
