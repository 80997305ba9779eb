"""Merges gathers of shards into buckets: fewer calls, each before the first use of what it brings.

This is the planning of gradient buckets (`wholestep.passes.comm.bucket_planner`) with time running backwards: a gather
has to be over before its value is used, as a reduction cannot start before its value is there. Looked at from the end,
the computation between two uses is what can hide the gather of the earlier one. Gathers at the end of a step, of
parameters that were updated in shards, have no use in it: they start when they are ready, as reductions do.

[Note: gathers before reductions]
Collectives start in one order, which is the same on every rank and which no later pass changes. The reduction of a
layer's gradients is ready just before the previous layer needs its parameters. So a gather stands before the
reductions that lie between it and the gather before it, and the scheduler can start it a bucket early::

    gather 1; layer 1; reduce 1; gather 0; layer 0   ->   gather 1; layer 1; gather 0; reduce 1; layer 0
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch.fx as fx

from wholestep.cost.cost_model import CostModel
from wholestep.ir import graph_edit, node_meta, op_info, printer
from wholestep.ir.node_meta import Bucket, BucketKind, Region
from wholestep.ir.program import Program
from wholestep.passes.analysis.task_graph import sharing
from wholestep.passes.comm.bucket_layouts import coalesce
from wholestep.passes.comm.bucket_planner import Costs, Cuts, Group, fixed_cuts, pack, planned_cuts
from wholestep.passes.comm.bucketing import DDP_LIMITS_BYTES, MEMORY_SHARE, Choose, choose_locally


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gathers:
    """The gathers of a step that may share buckets, in the order of planning: see the note above."""

    starts: Sequence[fx.Node]
    sizes_bytes: Sequence[int]
    keys: Sequence[Hashable]
    at_us: Sequence[float]
    """When each is ready, in rising order; of those with uses, how long before the end of the phase it is used."""
    end_us: float
    has_uses: bool


_NO_REDUCTION = (-1, -1)
"""In the place of the number and the place of a parameter in its reduction, if it has none."""


def bucket_gathers(
    program: Program, *, cost: CostModel, bucket_bytes: int | None = None, choose: Choose = choose_locally
) -> Program:
    """The program with its gathers in buckets. Arguments as `bucketing.bucket_gradients` takes them."""
    notes: list[str] = []
    for phase, starts in _by_phase(program).items():
        gathers = _in_order(program, phase, starts, cost)
        groups = _plan(program, gathers, cost=cost, bucket_bytes=bucket_bytes, choose=choose)
        if not gathers.has_uses:
            _bring_into_order(program.graph, gathers.starts)
        for group in sorted(groups, key=lambda group: group.items[0], reverse=gathers.has_uses):
            notes.append(_merge(program.graph, gathers, group, phase, len(notes)))
        graph_edit.sort_topologically(program.graph)
    if not notes:
        return program
    _before_reductions(program.graph)
    return program.with_notes(*notes)


def _by_phase(program: Program) -> dict[str, list[fx.Node]]:
    found: dict[str, list[fx.Node]] = {}
    for node in program.graph.find_nodes(op="call_function", target=op_info.c10d.all_gather_into_tensor.default):
        record = node_meta.bucket(node)
        if record is not None and record.kind is BucketKind.GATHER and record.reason == node_meta.UNBUCKETED:
            found.setdefault(record.phase or Region.FORWARD.value, []).append(node)
    return found


def _in_order(program: Program, phase: str, starts: list[fx.Node], cost: CostModel) -> _Gathers:
    has_uses = phase in node_meta.COMPUTING_PHASES
    at_us, end_us = _times_us(program, starts, cost, has_uses=has_uses)
    levels, reductions = _levels(program.graph), _reductions(program) if not has_uses else {}
    last = {
        node: max((reductions.get(name, _NO_REDUCTION) for name in _members(node)), default=_NO_REDUCTION)
        for node in starts
    }
    # In the order of its reduction, so that buckets of the same size are full after the same parameters.
    ordered = starts[::-1] if has_uses else sorted(starts, key=lambda node: (at_us[node], last[node]))
    return _Gathers(
        starts=ordered, sizes_bytes=[node_meta.num_bytes(node) for node in ordered],
        keys=[
            (
                node_meta.tensor(node).dtype, node_meta.tensor(node).device, node.args[1:], levels[node],
                last[node][0],  # one that waits for a later reduction would keep the others waiting
            )
            for node in ordered
        ],
        at_us=[end_us - at_us[node] if has_uses else at_us[node] for node in ordered], end_us=end_us,
        has_uses=has_uses,
    )  # fmt: skip


def _reductions(program: Program) -> dict[str, tuple[int, int]]:
    """The number of the reduction that brings the gradient of each parameter, and the parameter's place in it."""
    starts = [node for node in program.graph.nodes if op_info.is_collective(node)]
    brings = enumerate(filter(node_meta.brings_gradients, starts))
    return {name: (number, place) for number, node in brings for place, name in enumerate(_members(node))}


def _levels(graph: fx.Graph) -> dict[fx.Node, tuple[int, int]]:
    """By node, the most gathers on a way to it, and the place of the last call on such a way that draws or has effects.

    Gathers of one level can share a bucket: none depends on another, and all stand after the same calls that keep
    their order.
    """
    levels: dict[fx.Node, tuple[int, int]] = {}
    for place, node in enumerate(graph.nodes):
        record = node_meta.bucket(node)
        is_gather = record is not None and record.kind is BucketKind.GATHER
        of_args = [levels[arg] for arg in node.all_input_nodes]
        stays = node.op == "call_function" and not op_info.is_collective(node) and op_info.has_effect(node.target)
        levels[node] = (
            max((count for count, _ in of_args), default=0) + is_gather,
            place if stays else max((last for _, last in of_args), default=-1),
        )
    return levels


def _times_us(
    program: Program, starts: list[fx.Node], cost: CostModel, *, has_uses: bool
) -> tuple[dict[fx.Node, float], float]:
    """When each gather stands, of computation from the start of the step, and when the step ends.

    An updated parameter stands after all gradients, since one call updates all of them, but can be gathered once the
    reduction of its own gradient is over.
    """
    times_us = cost.times_us(list(program.graph.nodes))
    clock_us, at_us, reduced_us = 0.0, dict[fx.Node, float](), dict[str, float]()
    own = set(starts)
    for node in program.graph.nodes:
        record = node_meta.bucket(node)
        if node in own:
            known = [] if has_uses else [reduced_us[name] for name in _members(node) if name in reduced_us]
            at_us[node] = max(known, default=clock_us)
        elif record is not None and record.kind is not BucketKind.GATHER:
            reduced_us.update(dict.fromkeys(record.members, clock_us))
        elif node.op == "call_function" and record is None:
            clock_us += times_us[node]
    return at_us, clock_us


def _plan(
    program: Program, gathers: _Gathers, *, cost: CostModel, bucket_bytes: int | None, choose: Choose
) -> list[Group]:
    sizes, keys = gathers.sizes_bytes, gathers.keys
    if bucket_bytes is not None:
        cuts = fixed_cuts(sizes, keys, [bucket_bytes])
    else:
        cuts = choose(_text(gathers), _fastest(program, gathers, cost))
    return pack(sizes, keys, cuts)


def _fastest(program: Program, gathers: _Gathers, cost: CostModel) -> Callable[[], Cuts]:
    ranks = {axis.group: axis.size for axis in program.mesh}
    size = ranks[str(gathers.starts[0].args[-1])]
    costs = Costs(
        ready_us=gathers.at_us, update_us=[0.0] * len(gathers.starts), end_us=gathers.end_us,
        comm_us=lambda num_bytes: cost.collective_us("all_gather", int(num_bytes), size),
        launch_us=cost.launch_us if cost.device.host_is_device else 0.0, sharing=sharing(cost),
    )  # fmt: skip
    fixed = fixed_cuts(gathers.sizes_bytes, gathers.keys, DDP_LIMITS_BYTES)
    largest = max(group.num_bytes for group in pack(gathers.sizes_bytes, gathers.keys, fixed))
    cap_bytes = max(largest, DDP_LIMITS_BYTES[-1], int(MEMORY_SHARE * sum(gathers.sizes_bytes)))
    return lambda: planned_cuts(gathers.sizes_bytes, gathers.keys, costs, cap_bytes=cap_bytes, baselines=[fixed])


def _text(gathers: _Gathers) -> str:
    """The gathers in order; the same text on every rank."""
    lines = [f"{', '.join(_members(node))} {list(node_meta.tensor(node).shape)}" for node in gathers.starts]
    return "gathers:\n" + "\n".join(lines)


def _bring_into_order(graph: fx.Graph, starts: Sequence[fx.Node]) -> None:
    """Moves the starts after the last of them, in the order given; their readers are sorted after them later."""
    behind = max(starts, key=graph_edit.positions(graph).__getitem__).next
    for node in starts:
        behind.prepend(node)


def _members(node: fx.Node) -> tuple[str, ...]:
    record = node_meta.bucket(node)
    assert record is not None  # `_by_phase` has looked
    return record.members


def _merge(graph: fx.Graph, gathers: _Gathers, group: Group, phase: str, index: int) -> str:
    chosen = [gathers.starts[item] for item in group.items]
    members = chosen[::-1] if gathers.has_uses else chosen
    names = tuple(name for node in members for name in _members(node))
    reason = group.reason.replace("gradient", "gather")
    record = Bucket(index, names, group.num_bytes, reason, kind=BucketKind.GATHER, phase=phase)
    coalesce(graph, members, record, at=members[0] if gathers.has_uses else members[-1])
    return f"gather {index}, {phase}: {len(names)} tensors, {printer.bytes_text(group.num_bytes)}; {reason}"


def _before_reductions(graph: fx.Graph) -> None:
    """Moves gathers of the computation before reductions: see the note above."""
    earlier: list[fx.Node] = []  # reductions since the last gather
    for node in [node for node in graph.nodes if op_info.is_collective(node)]:
        if not node_meta.is_prefetchable(node):
            earlier.append(node)
            continue
        if earlier:
            order = graph_edit.positions(graph)
            needed = needed_since(node, earlier[0], order)
            last = max((place for place, one in enumerate(earlier) if one in needed), default=-1)
            for first in earlier[last + 1 : last + 2]:
                for one in sorted((*needed, node), key=order.__getitem__):
                    if order[one] > order[first]:
                        first.prepend(one)
        earlier = []


def needed_since(node: fx.Node, since: fx.Node, order: dict[fx.Node, int]) -> set[fx.Node]:
    """What a node depends on, as far as it does not stand before `since`."""
    found, stack = set[fx.Node](), [node]
    while stack:
        for arg in stack.pop().all_input_nodes:
            if order[arg] >= order[since] and arg not in found:
                found.add(arg)
                stack.append(arg)
    return found
