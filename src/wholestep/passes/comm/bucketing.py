"""Merges reductions of gradients into buckets: fewer, larger all-reduces.

Before and after, for gradients of one type that become ready in the order a, b::

    all_reduce(a * 0.5)                       flat = cat([reshape(a, [-1]), reshape(b, [-1])])
    all_reduce(b * 0.5)                ->     all_reduce(flat * 0.5)      # as soon as b is ready
    reader(wait(...), wait(...))              wait(...), split, views     # right before the first reader

The arithmetic is the same element by element: a product with 1/size, then the sum over the ranks.
Source of the idea and of filling buckets in the order in which gradients become ready: Li et al., "PyTorch
Distributed: Experiences on Accelerating Data Parallel Training", 2020.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.fx as fx

from wholestep.cost.cost_model import CostModel
from wholestep.ir import graph_edit, node_meta, op_info, printer
from wholestep.ir.program import Program
from wholestep.passes.analysis.foreach_items import follow, joined
from wholestep.passes.analysis.task_graph import sharing
from wholestep.passes.comm import wire_format
from wholestep.passes.comm.bucket_layouts import coalesce, flatten, granularity_bytes, memory_order, unflatten
from wholestep.passes.comm.bucket_planner import Costs, Cuts, Group, fixed_cuts, pack, planned_cuts
from wholestep.passes.comm.wire_format import ChooseWireFormat, WireFormat, unchanged

_aten = torch.ops.aten

DDP_LIMITS_BYTES = (1 << 20, 25 << 20)
"""The limits of the first and of all further buckets of DistributedDataParallel where the user sets none."""

MEMORY_SHARE = 1 / 8
"""Of the bytes of all gradients, what one bucket may take at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reduction:
    """One reduction of a gradient: ``wait(all_reduce(scale(grad)))``."""

    start: fx.Node
    waits: tuple[fx.Node, ...]
    scale: float | None
    """1/size where gradients are averaged; None for a sum."""

    @property
    def grad(self) -> fx.Node:
        """The gradient before it is scaled, as it is by now: the bucket of one axis gives it to that of the next."""
        message = self.start.args[0]
        grad = message if self.scale is None else message.args[0]  # type: ignore[union-attr]
        assert isinstance(grad, fx.Node)
        return grad


Choose = Callable[[str, Callable[[], Cuts]], Cuts]
"""Gives the cuts for gradients that a text describes: those chosen before for the same text, or what the call gives."""


def choose_locally(text: str, plan: Callable[[], Cuts]) -> Cuts:
    """Chooses anew, on this rank's numbers."""
    return plan()


def bucket_gradients(
    program: Program,
    *,
    cost: CostModel,
    bucket_bytes: int | None = None,
    choose: Choose = choose_locally,
    choose_wire_format: ChooseWireFormat = unchanged,
    aligned: bool = True,
) -> Program:
    """The program with its gradient reductions in buckets.

    Args:
        cost: predicted times, the same on every rank.
        bucket_bytes: a bucket is closed once it holds as many bytes, as DistributedDataParallel does it. None: buckets
            are those with the shortest predicted step.
        choose: how ranks whose batches differ come by the same buckets.
        choose_wire_format: the same on every rank; gradients that travel in different types share no bucket, and one
            that travels as rows has one of its own.
        aligned: gradients of odd sizes lie at the end of a bucket. False: as they become ready, which is how the hooks
            of DistributedDataParallel, whose numbers a compressor may have to meet, are given them.

    Only reductions that placement has marked, and that are in no bucket yet, take part. Random operators stay in order.
    """
    notes: list[str] = []
    reductions = list(_reductions(program))
    if reductions:
        gradients = _describe(program, reductions, choose=choose, choose_wire_format=choose_wire_format)
        groups = _plan(program, gradients, cost=cost, bucket_bytes=bucket_bytes, choose=choose)
        for index, group in enumerate(sorted(groups, key=lambda group: group.items[-1])):
            notes.append(_merge(program.graph, gradients, group, index, aligned=aligned))
        _settle(program)
    scattered = list(_scattered(program))
    if scattered:
        gradients = _describe(program, scattered, choose=choose, choose_wire_format=unchanged)
        groups = _plan(program, gradients, cost=cost, bucket_bytes=bucket_bytes, choose=choose)
        for group in sorted(groups, key=lambda group: group.items[-1]):
            notes.append(_coalesce(program.graph, gradients, group, len(notes)))
        _settle(program)
    return program.with_notes(*notes) if notes else program


def _settle(program: Program) -> None:
    graph_edit.sort_topologically(program.graph)
    graph_edit.remove_dead_code(program.graph)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gradients:
    """The reductions of a step and what decides which share a bucket; an entry per reduction."""

    reductions: Sequence[_Reduction]
    sizes_bytes: Sequence[int]
    keys: Sequence[Hashable]
    """Only reductions with the same key can share a bucket."""
    shares: Sequence[float]
    """Of the bytes of a reduction, how many travel."""
    needs: Sequence[frozenset[int]]
    """The earlier reductions that must be over before this one can start."""
    row_reasons: Cuts
    """Those that travel as rows, each with the reason."""


def _describe(
    program: Program, reductions: Sequence[_Reduction], *, choose: Choose, choose_wire_format: ChooseWireFormat
) -> _Gradients:
    formats = [choose_wire_format(one.grad, str(one.start.args[-1])) for one in reductions]
    row_reasons = _row_reasons(reductions, formats, choose)
    ranks = {axis.group: axis.size for axis in program.mesh}
    keys, shares = list[Hashable](), list[float]()
    for number, (one, way) in enumerate(zip(reductions, formats, strict=True)):
        as_rows, size = number in row_reasons, ranks[str(one.start.args[-1])]
        keys.append((_key(one), way.dtype, number if as_rows else None))
        shares.append(wire_format.share(one.grad, size) if as_rows else _share(one, way.dtype))
    return _Gradients(
        reductions=reductions,
        sizes_bytes=[node_meta.num_bytes(one.grad) for one in reductions],
        keys=keys,
        shares=shares,
        needs=_needs(program.graph, reductions),
        row_reasons=row_reasons,
    )


def _row_reasons(reductions: Sequence[_Reduction], formats: Sequence[WireFormat], choose: Choose) -> Cuts:
    """The gradients that travel as rows, with the reason: it pays for rank 0's first batch."""

    def plan() -> Cuts:
        counts = {number: wire_format.num_rows(one.grad) for number, one in enumerate(reductions)}
        return {
            number: f"rows: a batch of rank 0 looks up {count:,} of "
            f"{node_meta.tensor(reductions[number].grad).shape[0]:,}"
            for number, count in counts.items()
            if count is not None and count <= formats[number].max_rows
        }

    return choose(f"as rows:\n{_text(reductions)}", plan) if any(way.max_rows for way in formats) else {}


def _plan(
    program: Program, gradients: _Gradients, *, cost: CostModel, bucket_bytes: int | None, choose: Choose
) -> list[Group]:
    """Which gradients share a bucket, by their numbers."""
    if bucket_bytes is not None:
        cuts = fixed_cuts(gradients.sizes_bytes, gradients.keys, [bucket_bytes])
    else:
        cuts = choose(_text(gradients.reductions), lambda: _fastest_cuts(gradients, _costs(program, gradients, cost)))
    return pack(gradients.sizes_bytes, gradients.keys, cuts, needs=gradients.needs)


def _fastest_cuts(gradients: _Gradients, costs: Costs) -> Cuts:
    """The cuts with the shortest predicted step."""
    sizes_bytes, keys, needs = gradients.sizes_bytes, gradients.keys, gradients.needs
    ddp = fixed_cuts(sizes_bytes, keys, DDP_LIMITS_BYTES)
    largest = max(group.num_bytes for group in pack(sizes_bytes, keys, ddp, needs=needs))
    cap_bytes = max(largest, DDP_LIMITS_BYTES[-1], int(MEMORY_SHARE * sum(sizes_bytes)))
    return planned_cuts(sizes_bytes, keys, costs, cap_bytes=cap_bytes, baselines=[ddp, {}], needs=needs)


def _text(reductions: Sequence[_Reduction]) -> str:
    """The gradients in the order in which they are ready; the same text on every rank."""
    lines = (
        f"{', '.join(_bucket_of(one).members)} "
        f"{node_meta.tensor(one.grad).dtype}{list(node_meta.tensor(one.grad).shape)}"
        for one in reductions
    )
    return "\n".join(lines) + "\n"


def _costs(program: Program, gradients: _Gradients, cost: CostModel) -> Costs:
    """When each gradient is ready, what comes after it, and what its reduction takes."""
    graph, reductions = program.graph, gradients.reductions
    sources = {wait: 1 << number for number, one in enumerate(reductions) for wait in one.waits}
    masks = follow(graph, sources, scalars=True)
    everything = (1 << len(reductions)) - 1
    ready_us, end_us, update_us, barrier = [], 0.0, 0.0, False
    starts = {one.start for one in reductions}
    scaled = {one.start.args[0] for one in reductions if one.scale is not None}
    num_calls = 1 if scaled else 0
    times_us = cost.times_us(list(graph.nodes))
    for node in graph.nodes:
        if node in starts:
            ready_us.append(end_us)
        if node.op != "call_function":
            continue
        if joined(masks[node]) or node_meta.origin(node).region is node_meta.Region.OPTIMIZER:
            update_us += times_us[node]
            num_calls += op_info.is_indexwise(node.target)
            barrier |= masks[node] == everything and not op_info.is_indexwise(node.target) and len(reductions) > 1
        elif node in scaled:  # one call for each gradient as placed, and for each bucket later
            end_us += max(0.0, times_us[node] - cost.call_us)
        else:
            end_us += times_us[node]
    total_bytes = sum(gradients.sizes_bytes) or 1
    ranks = {axis.group: axis.size for axis in program.mesh}
    one = reductions[0].start
    return Costs(
        ready_us=ready_us,
        update_us=[update_us * size / total_bytes for size in gradients.sizes_bytes],
        end_us=end_us,
        comm_us=partial(_comm_us, cost, one, ranks[str(one.args[-1])]),
        shares=gradients.shares,
        launch_us=cost.launch_us if cost.device.host_is_device else 0.0,
        calls_us=num_calls * cost.call_us,
        fill_us=cost.call_us,
        sharing=sharing(cost),
        barrier=barrier,
    )


def _comm_us(cost: CostModel, start: fx.Node, num_ranks: int, num_bytes: float) -> float:
    """Time of a reduction as `start` is one, of so many bytes."""
    is_scatter = start.target is op_info.c10d.reduce_scatter_tensor.default
    return cost.collective_us("reduce_scatter" if is_scatter else "all_reduce", int(num_bytes), num_ranks)


def _reductions(program: Program) -> Iterator[_Reduction]:
    """The marked reductions in the order in which they start, as gradients become ready."""
    scales = {axis.group: 1 / axis.size for axis in program.mesh}
    for node in program.graph.find_nodes(op="call_function", target=op_info.c10d.all_reduce.default):
        record = node_meta.bucket(node)
        if record is None or record.reason != node_meta.UNBUCKETED:
            continue
        message, scale = node.args[0], None
        # Only the product that placement has put there: one of the user's own would split buckets by its factor.
        if message.target is _aten.mul.Tensor and message.args[1] == scales[node.args[-1]]:
            scale = message.args[1]
        waits = tuple(user for user in node.users if user.target is op_info.WAIT)
        yield _Reduction(start=node, waits=waits, scale=scale)


def _scattered(program: Program) -> Iterator[_Reduction]:
    """The marked reductions of which each rank gets its shard, in the order in which they start."""
    for node in program.graph.find_nodes(op="call_function", target=op_info.c10d.reduce_scatter_tensor.default):
        record = node_meta.bucket(node)
        if record is not None and record.reason == node_meta.UNBUCKETED:
            waits = tuple(user for user in node.users if user.target is op_info.WAIT)
            yield _Reduction(start=node, waits=waits, scale=None)


def _bucket_of(reduction: _Reduction) -> node_meta.Bucket:
    record = node_meta.bucket(reduction.start)
    assert record is not None  # `_reductions` has looked
    return record


def _orders(reduction: _Reduction) -> tuple[tuple[int, ...] | None, ...]:
    """How the gradients of a reduction lie in the bucket that it joins."""
    order = memory_order(node_meta.tensor(reduction.grad))
    return _bucket_of(reduction).orders or (None if order is None else tuple(order),)


def _share(reduction: _Reduction, dtype: torch.dtype) -> float:
    """Share of the bytes that travel if gradients are sent in `dtype` and return in their own."""
    return (1 + dtype.itemsize / node_meta.tensor(reduction.grad).dtype.itemsize) / 2


def _key(reduction: _Reduction) -> Hashable:
    """Only reductions with the same key can share a bucket."""
    tensor = node_meta.tensor(reduction.grad)
    return (tensor.dtype, tensor.device, reduction.scale, reduction.start.args[1:])


def _needs(graph: fx.Graph, reductions: Sequence[_Reduction]) -> list[frozenset[int]]:
    """For each reduction, the earlier ones that must be over before it can start.

    Those are the ones its gradient is computed from. Besides: merging delays whoever reads a member, and a
    random operator must not be delayed past another one, so whatever a random operator, an effect or a collective
    of the user depends on has to be over before any later gradient is taken.
    """
    index_of = {wait: index for index, one in enumerate(reductions) for wait in one.waits}
    number_of = {one.start: index for index, one in enumerate(reductions)}
    masks: dict[fx.Node, int] = {}
    needs: list[frozenset[int]] = [frozenset()] * len(reductions)
    fence = 0
    for node in graph.nodes:
        mask = 1 << index_of[node] if node in index_of else 0
        for arg in node.all_input_nodes:
            mask |= masks[arg]
        masks[node] = mask
        theirs = op_info.is_collective(node) and node_meta.bucket(node) is None
        if node.op == "call_function" and (theirs or op_info.has_effect(node.target)):
            fence |= mask
        if node in number_of:
            needs[number_of[node]] = frozenset(_bits(mask | fence))
    return needs


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _merge(graph: fx.Graph, gradients: _Gradients, group: Group, index: int, *, aligned: bool) -> str:
    """Makes one reduction of those of a group. The note says which bucket it is."""
    members = [gradients.reductions[item] for item in group.items]
    laid_out = sorted(members, key=lambda one: granularity_bytes(one.grad), reverse=True) if aligned else members
    names = tuple(name for one in laid_out for name in _bucket_of(one).members)
    orders = tuple(order for one in laid_out for order in _orders(one))
    first = group.items[0]
    reason = gradients.row_reasons.get(first, group.reason)
    record = node_meta.Bucket(
        index, names, group.num_bytes, reason, orders,
        as_rows=first in gradients.row_reasons, share=gradients.shares[first],
    )  # fmt: skip
    _join(graph, laid_out, record, last=members[-1].start)
    return f"bucket {index}: {len(names)} gradients, {printer.bytes_text(group.num_bytes)}; {reason}"


def _coalesce(graph: fx.Graph, gradients: _Gradients, group: Group, index: int) -> str:
    """Makes one call of the reductions of a group: their messages travel side by side, and nothing is copied."""
    members = [gradients.reductions[item] for item in group.items]
    names = tuple(name for one in members for name in _bucket_of(one).members)
    record = node_meta.Bucket(index, names, group.num_bytes, group.reason, kind=node_meta.BucketKind.SCATTER)
    last = members[-1].start
    waits = coalesce(graph, [one.start for one in members], record, at=last)
    reader = _first_reader(graph, members, after=last)
    for wait in waits:
        reader.prepend(wait)
    return f"bucket {index}: shards of {len(names)} gradients, {printer.bytes_text(group.num_bytes)}; {group.reason}"


def _join(graph: fx.Graph, members: Sequence[_Reduction], record: node_meta.Bucket, *, last: fx.Node) -> None:
    """Makes one reduction of `members`, in this order, at the place of the last to start."""
    if len(members) == 1 and node_meta.tensor(members[0].grad).is_contiguous():
        node_meta.set_bucket(last, record)
        _delay_waits(graph, members[0])
        return
    with graph.inserting_before(last):
        flats = [flatten(graph, one.grad) for one in members]
        flat = flats[0] if len(flats) == 1 else graph_edit.emit(graph, _aten.cat.default, flats, like=last)
        scale = members[0].scale
        if scale is not None:
            flat = graph_edit.emit(graph, _aten.mul.Tensor, flat, scale, like=last)
        start = graph_edit.emit(graph, last.target, flat, *last.args[1:], like=last)  # type: ignore[arg-type]
        node_meta.set_bucket(start, record)
    with graph.inserting_before(_first_reader(graph, members, after=last)):
        waited = graph_edit.emit(graph, op_info.WAIT, start, like=last)
        sizes = [node_meta.tensor(one.grad).numel() for one in members]
        parts = [waited]
        if len(members) > 1:
            split = graph_edit.emit(graph, _aten.split_with_sizes.default, waited, sizes, like=last)
            parts = [graph_edit.emit(graph, operator.getitem, split, index, like=last) for index in range(len(sizes))]
        views = [unflatten(graph, part, one.grad) for part, one in zip(parts, members, strict=True)]
    graph_edit.replace_nodes({wait: view for one, view in zip(members, views, strict=True) for wait in one.waits})
    for one in members:
        graph.erase_node(one.start)


def _delay_waits(graph: fx.Graph, reduction: _Reduction) -> None:
    reader = _first_reader(graph, [reduction], after=reduction.start)
    for wait in reduction.waits:
        reader.prepend(wait)


def _first_reader(graph: fx.Graph, members: Sequence[_Reduction], *, after: fx.Node) -> fx.Node:
    """The first node after `after` that reads a result."""
    # Readers before it will be moved after it.
    readers = {user for one in members for wait in one.waits for user in wait.users}
    node = after.next
    early = not readers or any(_before(reader, after) for reader in readers)
    while not early and node not in readers and node.op != "output":
        node = node.next
    return node


def _before(a: fx.Node, b: fx.Node) -> bool:
    return bool(a < b)
