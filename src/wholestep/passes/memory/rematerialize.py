"""Computes forward values again in the backward, as many as a memory budget asks for.

Before and after, where `hidden` is large and cheap::

    hidden = relu(linear)                       hidden = relu(linear)
    out = mm(hidden, w)                         out = mm(hidden, w)           # hidden is free from here on
    ...                                  ->     ...
    grad_w = mm(t(hidden), grad)                hidden_again = relu(linear)
                                                grad_w = mm(t(hidden_again), grad)

`remat_planner` decides on plain numbers; here the graph becomes numbers and the plan nodes.

Note: what is never computed again
    Collectives and waits, effects, operators that are not torch's own, calls that may fail (updates of parameters
    stand after the last of those, and would move), sizes that are data, and what the step returns. In modules that
    the user checkpoints nothing else is dropped: what is left there is what was asked to be kept.

Note: random numbers
    A random operator that is done again draws the same numbers: the state of its generator is read before it, set for
    the time of the second call, and set back after that, so that later draws do not notice.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx

from wholestep.cost.cost_model import CostModel
from wholestep.errors import ConfigError
from wholestep.ir import graph_edit, node_meta, op_info, printer
from wholestep.ir.node_meta import Region
from wholestep.ir.ops import rng_state
from wholestep.ir.program import Program
from wholestep.ir.sizes import is_data
from wholestep.passes.analysis.task_graph import Tasks, tasks_of
from wholestep.passes.memory import remat_planner
from wholestep.passes.memory.remat_evaluator import Call, Plan, Problem

_aten = torch.ops.aten

Budget = int | float
"""Bytes that live besides the inputs (int), or a fraction of what the step needs without recomputation (float)."""


def rematerialize(program: Program, *, cost: CostModel, budget: Budget) -> Program:
    """The program whose live bytes stay within the budget, in the least additional time that was found.

    Args:
        program: in the order in which it runs; the bytes of that order count, as `cost.memory` does it.
        cost: predicted times; the same on every rank, so that all plan alike.
        budget: bytes besides the inputs, or a fraction (0 to 1) of the peak without recomputation.

    A fraction that cannot be reached is taken as a wish: the smallest peak that was found is taken, and a note says so.
    A program that has been through this pass stays as it is.
    Raises ConfigError for a budget that is neither, and for bytes that cannot be reached.
    """
    check_budget(budget)
    if any(node_meta.repeats(node) is not None for node in program.graph.nodes):
        return program
    tasks = tasks_of(program, cost)
    planner = remat_planner.Planner(_problem(program, tasks))
    before_bytes = planner.baseline.peak_bytes
    budget_bytes = budget if isinstance(budget, int) else int(budget * before_bytes)
    plan = planner.plan(budget_bytes)
    if plan.peak_bytes > budget_bytes and isinstance(budget, int):
        raise ConfigError(
            f"memory_budget={budget} wants at most {printer.bytes_text(budget)} besides the inputs of the step. It "
            f"needs {printer.bytes_text(before_bytes)}, and {printer.bytes_text(plan.peak_bytes)} "
            f"({plan.peak_bytes} bytes) with recomputation. Give as much, or make the batch smaller."
        )
    _rewrite(program.graph, tasks, plan)
    dropped = sum(make.num_bytes for one in tasks.usages for make in one.makes if make.buffer in plan.dropped)
    notes = [
        f"{len(plan.repeats)} calls done again in the backward, {plan.us:.0f} us, so that {len(plan.dropped)} values "
        f"({printer.bytes_text(dropped)}) need not be kept",
        f"at most {printer.bytes_text(plan.peak_bytes)} live besides the inputs (before: "
        f"{printer.bytes_text(before_bytes)}; budget: {printer.bytes_text(budget_bytes)})",
    ]
    if plan.peak_bytes > budget_bytes:
        notes.append("the budget cannot be reached; this is the smallest that was found")
    return program.with_notes(*notes)


def check_budget(budget: Budget) -> None:
    """Raises ConfigError for what is neither bytes nor a fraction."""
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or budget <= 0:
        raise ConfigError(
            f"memory_budget wants bytes, such as 8 << 30, or a fraction of the peak, such as 0.6; got {budget!r}."
        )
    if isinstance(budget, float) and budget > 1:
        raise ConfigError(f"memory_budget={budget} wants a fraction of at most 1.0, or bytes as an int.")


def _problem(program: Program, tasks: Tasks) -> Problem:
    """The calls of the graph as numbers."""
    number_of = {node: number for number, node in enumerate(tasks.nodes)}
    origins = map(node_meta.origin, tasks.nodes)
    checkpointed = {origin.module for origin in origins if origin.region is Region.RECOMPUTE}
    calls: list[Call] = []
    kept: set[int] = set()
    for node, task, usage, home in zip(tasks.nodes, tasks.tasks, tasks.usages, tasks.homes, strict=True):
        may_repeat = _may_repeat(node)
        read = [] if may_repeat and _is_memory(node) else node.all_input_nodes
        state_bytes = rng_state.state_bytes(_device(node)) if may_repeat and op_info.is_random(node.target) else 0
        if node_meta.origin(node).module in checkpointed or any(user.op == "output" for user in node.users):
            kept.update(home)
        if node_meta.origin(node).region is Region.RECOMPUTE:
            kept.update(
                buffer for arg in node.all_input_nodes if arg in number_of for buffer in tasks.homes[number_of[arg]]
            )
        calls.append(Call(
            usage=usage, args=tuple(number_of[arg] for arg in read if arg in number_of), buffers=home,
            late=node_meta.origin(node).region is not Region.FORWARD, recompute_us=task.us if may_repeat else None,
            state_bytes=state_bytes,
        ))  # fmt: skip
    return Problem(calls=calls, pinned=tasks.pinned, writable=tasks.writable, kept=kept)


def _may_repeat(node: fx.Node) -> bool:
    """Whether a second call gives the same values and does nothing else."""
    if node_meta.origin(node).region is not Region.FORWARD or node.op != "call_function" or not _known_sizes(node):
        return False
    if node.target is operator.getitem:
        return True
    if (
        not op_info.is_op(node)
        or not _of_torch(node.target)
        or op_info.may_fail(node.target)
        or op_info.needs_peers(node.target)
    ):
        return False
    if op_info.is_random(node.target):
        return node.kwargs.get("generator") is None and _device(node).type in ("cpu", "cuda")
    return not op_info.has_effect(node.target)


def _known_sizes(node: fx.Node) -> bool:
    tensors = list(node_meta.tensors(node))
    return bool(tensors) and not any(is_data(size) for one in tensors for size in (*one.shape, *one.stride()))


def _of_torch(op: Any) -> bool:
    return op.namespace in ("aten", "prims") or op._schema.name.startswith("wholestep_functional::aten__")


def _device(node: fx.Node) -> torch.device:
    return next(node_meta.tensors(node)).device


def _is_memory(node: fx.Node) -> bool:
    """Whether the call only makes memory; a second call needs to read nothing for that."""
    return node.target is _aten.empty_like.default


def _rewrite(graph: fx.Graph, tasks: Tasks, plan: Plan) -> None:
    """Puts the calls that are done again where the plan has them; what is late reads those."""
    copies: dict[fx.Node, fx.Node] = {}
    for number, place in plan.repeats.items():
        node = tasks.nodes[number]
        with graph.inserting_before(tasks.nodes[place]):
            copies[node] = _repeat(graph, node, copies)
    new = set(copies.values())
    for node, copy in copies.items():
        for user in list(node.users):
            if user not in new and node_meta.origin(user).region is not Region.FORWARD:
                user.replace_input_with(node, copy)
    graph_edit.remove_dead_code(graph)


def _repeat(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """A second call of `node` at the insertion point."""
    origin = replace(node_meta.origin(node), region=Region.RECOMPUTE)
    if _is_memory(node):
        one = node_meta.tensor(node)
        copy = graph_edit.emit(
            graph, _aten.empty_strided.default, list(one.shape), list(one.stride()), dtype=one.dtype, device=one.device
        )
    elif op_info.is_random(node.target):
        copy = _replay(graph, node, copies)
    else:
        copy = _copy(graph, node, copies)
    node_meta.set_origin(copy, origin)
    node_meta.set_repeats(copy, node.name)
    return copy


def _copy(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    copy = graph.node_copy(node, lambda arg: copies.get(arg, arg))
    graph_edit.evaluate(copy)
    return copy


def _replay(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    device = str(_device(node))
    with graph.inserting_before(node):
        then = graph_edit.emit(graph, rng_state.GET, device, like=node)
    now = graph_edit.emit(graph, rng_state.GET, device)
    calls = [
        now,
        graph_edit.emit(graph, rng_state.SET, then, device),
        _copy(graph, node, copies),
        graph_edit.emit(graph, rng_state.SET, now, device),
    ]
    for call in calls:
        node_meta.set_origin(call, replace(node_meta.origin(node), region=Region.RECOMPUTE))
    return calls[2]
