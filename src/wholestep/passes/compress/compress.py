"""Compresses what buckets carry: other tensors travel in the place of the gradients.

Before and after, for ``CastCompress(torch.bfloat16)`` on two ranks::

    all_reduce(flat * 0.5)                    half = div(to(flat, bfloat16), 2)
    total = wait(...)                  ->     all_reduce(half)
    split(total)                              split(to(wait(...), float32))

An algorithm is a generator on tensors: it yields what is to be summed over the ranks, is sent the sums, and gives
the gradients. It is traced into the graph, where what it yields becomes collectives and waits. What it
remembers from call to call are inputs of the kind COMM with WRITE outputs, which the compiled step holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from wholestep.capture.functionalize.functionalize import functional_call
from wholestep.config import CastCompress, CommHook, Compress, Compressor, PowerSGD
from wholestep.errors import ConfigError
from wholestep.ir import graph_edit, node_meta, op_info, printer
from wholestep.ir.ops.comm_hook import CALL_ON_BUCKET, BucketFunction
from wholestep.ir.program import Input, InputKind, Output, OutputKind, Placement, Program
from wholestep.passes.compress import powersgd
from wholestep.passes.compress.comm_hook import HookCall, reads_state
from wholestep.passes.compress.powersgd import Messages

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bucket:
    """A reduction that carries gradients as they are: ``wait(all_reduce(flat * 1/size))``."""

    start: fx.Node
    flat: fx.Node
    """The gradients of this rank before they are scaled."""
    num_ranks: int
    averaged: bool
    """Whether gradients are averaged over the ranks, or summed."""
    record: node_meta.Bucket

    @property
    def divisor(self) -> int:
        """What the sum over the ranks is divided by."""
        return self.num_ranks if self.averaged else 1


Algorithm = Callable[..., Generator[Messages, Messages, list[Tensor]]]
"""Takes the flat bucket and what it remembers; gives the flat bucket reduced, and the new memory."""


def _dropped(function: BucketFunction) -> None:
    """For programs that are not run."""


def compress(
    program: Program, *, how: Compress, started: bool = True, keep: Callable[[BucketFunction], None] = _dropped
) -> Program:
    """The program with its buckets compressed; they are those that carry gradients as they are.

    Args:
        how: what travels.
        started: False in the calls before ``PowerSGD.start_iter``, where gradients travel as they are.
        keep: takes what the graph calls by number, and holds it as long as the graph may run.

    Raises:
        ConfigError: a compressor of the user's cannot be traced, or gives other shapes than it has to.
    """
    buckets = list(_buckets(program))
    if not started:
        return program.with_notes(*_notes_of_start(program, how, buckets))
    work = _Compress(program, how)
    if isinstance(how, CommHook):
        notes = [work.by_hook(one, how, is_last=one is buckets[-1], keep=keep) for one in buckets]
    else:
        notes = [work.bucket(one) for one in buckets]
    return work.finish().with_notes(*notes)


def _buckets(program: Program) -> Iterator[_Bucket]:
    sizes = {axis.group: axis.size for axis in program.mesh}
    for start in program.graph.find_nodes(op="call_function", target=op_info.c10d.all_reduce.default):
        record = node_meta.bucket(start)
        if record is None or not record.orders:
            continue
        flat, size = start.args[0], sizes[start.args[-1]]
        averaged = flat.target is _aten.mul.Tensor and flat.args[1] == 1 / size
        flat = flat.args[0] if averaged else flat
        yield _Bucket(start=start, flat=flat, num_ranks=size, averaged=averaged, record=record)


def _notes_of_start(program: Program, how: Compress, buckets: Sequence[_Bucket]) -> Iterator[str]:
    if isinstance(how, PowerSGD):
        shapes = _shapes(program)
        whole = [shapes[name] for one in buckets for name in one.record.members]
        yield (
            f"the first {how.start_iter} calls reduce gradients as they are; then PowerSGD of rank {how.rank} takes "
            f"{len(powersgd.find_factors(whole, how))} of {len(whole)} gradients"
        )


def _shapes(program: Program) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter by name."""
    return {record.name: record.constant_shape for record in program.inputs if record.kind is InputKind.PARAM}


class _Compress:
    """The pass at work on one program."""

    def __init__(self, program: Program, how: Compress) -> None:
        self.program, self.graph, self.how = program, program.graph, how
        self.shapes = _shapes(program)
        self.inputs: list[Input] = []
        self.placeholders: list[fx.Node] = []
        self.latest: dict[str, fx.Node] = {}
        """Name of a new input -> the node with its newest value, at first its placeholder."""

    def bucket(self, one: _Bucket) -> str:
        """Compresses one bucket. Gives a note on what came of it."""
        dtype, record, how = node_meta.tensor(one.flat).dtype, one.record, self.how
        if not dtype.is_floating_point:
            return f"bucket {record.index} travels as it is: {dtype} is no real floating-point type"
        if len(set(record.members)) < len(record.members):
            return f"bucket {record.index} travels as it is: a parameter has two gradients in it"
        num_bytes = node_meta.num_bytes(one.flat)
        if isinstance(how, PowerSGD):
            starts = self._powersgd(one, how)
        elif isinstance(how, CastCompress):
            name = f"cast to {str(how.dtype).removeprefix('torch.')}"
            starts = self._insert(one, partial(_cast, how=how, divisor=one.divisor, name=name), {name: None})
        else:
            assert not isinstance(how, CommHook)  # `by_hook`
            starts = self._of_users(one, how)
        travel = sum(node_meta.num_bytes(start) for start in starts)
        travels, whole = printer.bytes_text(travel), printer.bytes_text(num_bytes)
        return f"bucket {record.index}: {travels} travel for {whole} of gradients"

    def by_hook(self, one: _Bucket, how: CommHook, *, is_last: bool, keep: Callable[[BucketFunction], None]) -> str:
        """Has a hook of the user's reduce one bucket: traced, or else called as it is. Gives a note on which."""
        record, shapes = one.record, [self.shapes[name] for name in one.record.members]
        call = HookCall(how, record.index, is_last, partial(_split, shapes=shapes, orders=record.orders))
        reason = reads_state(how)
        if not reason:
            try:
                self._insert(one, partial(_hooked, call=call.traced), {"hook": None})
                return f"bucket {record.index} is reduced by {call.name}, which is part of the graph"
            except ConfigError:
                raise
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
        function = BucketFunction(call)
        keep(function)
        self._insert(one, partial(_hooked, call=lambda flat: CALL_ON_BUCKET(flat, function.number)), {"hook": None})
        return f"bucket {record.index} is reduced by {call.name}, called at every run, since it reads {reason}"

    def _of_users(self, one: _Bucket, how: Compressor) -> list[fx.Node]:
        name = type(how).__name__
        try:
            return self._insert(one, partial(_custom, how=how, divisor=one.divisor, name=name), {name: None})
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"DDP(compress=...): the functions of {name} cannot become part of the graph: {error}. They may use "
                f"any torch operator, but not look at values of tensors."
            ) from error

    def _powersgd(self, one: _Bucket, how: PowerSGD) -> list[fx.Node]:
        names, shapes = one.record.members, [self.shapes[name] for name in one.record.members]
        factors = powersgd.find_factors(shapes, how)
        packed = [names[factor.index] for factor in factors]
        rest = [name for name in names if name not in packed]
        errors = [f"powersgd.error.{name}" for name in names] if how.error_feedback else []
        qs = [f"powersgd.q.{name}" for name in packed]
        for name, shape in zip(errors, shapes, strict=bool(errors)):
            self._remember(name, shape, one, Placement.LOCAL)
        for name, factor in zip(qs, factors, strict=True):
            self._remember(name, (factor.cols, factor.rank), one, Placement.REPLICATE)
        algorithm = partial(_low_rank, shapes=shapes, bucket=one, how=how)
        carried = {"uncompressed": rest, "P": packed, "Q": packed}
        return self._insert(one, algorithm, carried, errors, qs, kept=[*errors, *(qs if how.warm_start else ())])

    def _remember(self, name: str, shape: tuple[int, ...], one: _Bucket, placement: Placement) -> None:
        """Adds an input of the kind COMM, unless an earlier bucket of the step has added it."""
        if name in self.latest:
            return
        flat = node_meta.tensor(one.flat)
        with self.graph.inserting_after(self.program.placeholders[-1]):
            node = self.graph.placeholder(re.sub(r"\W", "_", name))
        with node_meta.fake_mode(self.graph):
            node_meta.set_value(node, torch.empty(shape, dtype=flat.dtype, device=flat.device))
        record = Input(
            kind=InputKind.COMM, name=name, shape=shape, dtype=flat.dtype, placement=placement, bucket=one.record.index
        )
        self.inputs.append(record)
        self.placeholders.append(node)
        self.latest[name] = node

    def _insert(
        self,
        one: _Bucket,
        algorithm: Algorithm,
        carried: Mapping[str, Sequence[str] | None],
        *memory: Sequence[str],
        kept: Sequence[str] = (),
    ) -> list[fx.Node]:
        """Puts the traced algorithm in the place of a bucket's reduction; gives its collectives.

        Args:
            one: the bucket.
            algorithm: takes the bucket as one dimension, then a list of tensors per list of names in `memory`.
            carried: what a message is -> the parameters in it; None for all of the bucket.
            memory: names of inputs.
            kept: those of which the algorithm gives the new value, in order.
        """
        sources = [one.flat, *(self.latest[name] for names in memory for name in names)]
        inner, sent = _traced(algorithm, sources, [len(names) for names in memory], str(one.start.args[-1]))
        if inner.graph.find_nodes(op="get_attr"):
            raise ConfigError(
                "DDP(compress=...): a compressor reads a tensor from elsewhere. Make it from the argument."
            )
        with self.graph.inserting_before(one.start):
            copies = dict(zip(inner.graph.find_nodes(op="placeholder"), sources, strict=True))
            first = one.start.prev
            results: Any = self.graph.graph_copy(inner.graph, copies)
        added = _between(first, one.start)
        for node in added:
            node_meta.set_origin(node, node_meta.origin(one.start))
        starts = [node for node in added if op_info.is_collective(node)]
        for start, name in zip(starts, sent or ["hook"] * len(starts), strict=True):
            members = carried[name]
            record = replace(
                one.record, members=one.record.members if members is None else tuple(members), orders=(),
                num_bytes=node_meta.num_bytes(start), reason=f"{name}; {one.record.reason}",
            )  # fmt: skip
            node_meta.set_bucket(start, record)
        self._replace(one, added, results[0])
        self.latest.update(zip(kept, results[1:], strict=True))
        return starts

    def _replace(self, one: _Bucket, added: list[fx.Node], result: fx.Node) -> None:
        """What read the reduction reads `result`; what waits stands where the wait stood."""
        waits = sorted(op_info.waits(one.start))
        first_wait = next((index for index, node in enumerate(added) if node.target is op_info.WAIT), len(added))
        for node in added[first_wait:]:
            waits[0].prepend(node)
        for wait in waits:
            graph_edit.replace_node(wait, result)
        self.graph.erase_node(one.start)
        _unjoin(result)

    def finish(self) -> Program:
        """The program with its new inputs, and their new values as WRITE outputs."""
        known = len(self.program.inputs)
        outputs, results = list(self.program.outputs), list(self.program.results)
        for index, (record, node) in enumerate(zip(self.inputs, self.placeholders, strict=True)):
            if self.latest[record.name] is not node:
                outputs.append(Output(kind=OutputKind.WRITE, name=record.name, target=known + index))
                results.append(self.latest[record.name])
        graph_edit.set_results(self.graph, results)
        graph_edit.sort_topologically(self.graph)
        graph_edit.remove_dead_code(self.graph)
        return replace(self.program, inputs=(*self.program.inputs, *self.inputs), outputs=tuple(outputs))


def _traced(
    algorithm: Algorithm, sources: Sequence[fx.Node], lengths: Sequence[int], group: str
) -> tuple[fx.GraphModule, list[str]]:
    """The algorithm as a graph of ATen operators, and what each of its collectives carries."""
    sent: list[str] = []

    def run(flat: Tensor, *memory: Tensor) -> list[Tensor]:
        ends = [sum(lengths[: index + 1]) for index in range(len(lengths))]
        lists = [list(memory[end - length : end]) for end, length in zip(ends, lengths, strict=True)]
        steps = algorithm(_line(flat), *lists)
        answer: Messages | None = None
        while True:
            try:
                messages = steps.send(answer)  # type: ignore[arg-type]
            except StopIteration as end:
                reduced, *rest = end.value
                return [reduced if flat.dim() == 1 else reduced.view(flat.shape), *rest]
            started = {name: op_info.c10d.all_reduce.default(one, "sum", group) for name, one in messages.items()}
            sent.extend(started)
            answer = {name: op_info.WAIT(one) for name, one in started.items()}

    inner = functional_call(run, [node_meta.tensor(node) for node in sources], node_meta.fake_mode(sources[0].graph))
    return inner, sent


def _cast(flat: Tensor, *, how: CastCompress, divisor: int, name: str) -> Generator[Messages, Messages, list[Tensor]]:
    wire = flat.to(how.dtype)
    sums = yield {name: wire / divisor if divisor > 1 else wire}
    return [sums[name].to(flat.dtype)]


def _custom(flat: Tensor, *, how: Compressor, divisor: int, name: str) -> Generator[Messages, Messages, list[Tensor]]:
    wire = how.compress(flat * (1 / divisor) if divisor > 1 else flat)
    if not isinstance(wire, Tensor):
        raise ConfigError(f"{name}.compress has to give one tensor, got {type(wire).__name__}.")
    sums = yield {name: wire}
    result = how.decompress(sums[name], flat.numel())
    if not isinstance(result, Tensor) or result.numel() != flat.numel():
        got = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise ConfigError(f"{name}.decompress(wire, {flat.numel()}) has to give that many elements, got {got}.")
    return [_line(result.to(flat.dtype))]


def _hooked(flat: Tensor, *, call: Callable[[Tensor], Tensor]) -> Generator[Messages, Messages, list[Tensor]]:
    yield from ()
    return [call(flat)]


def _split(flat: Tensor, *, shapes: Sequence[tuple[int, ...]], orders: Sequence[Sequence[int] | None]) -> list[Tensor]:
    """The gradients in a bucket, in the shapes of their parameters."""
    parts = flat.split([prod(shape) for shape in shapes]) if len(shapes) > 1 else [flat]
    return [_shaped(part, shape, order) for part, shape, order in zip(parts, shapes, orders, strict=True)]


def _low_rank(
    flat: Tensor,
    errors: list[Tensor],
    qs: list[Tensor],
    *,
    shapes: Sequence[tuple[int, ...]],
    bucket: _Bucket,
    how: PowerSGD,
) -> Generator[Messages, Messages, list[Tensor]]:
    orders = bucket.record.orders
    grads = _split(flat, shapes=shapes, orders=orders)
    reduced = yield from powersgd.exchange(grads, errors, qs, config=how, num_ranks=bucket.num_ranks)
    grads = reduced.grads if bucket.averaged else list(_aten._foreach_mul.Scalar(reduced.grads, bucket.num_ranks))
    flats = [_line(g if order is None else g.permute(order)) for g, order in zip(grads, orders, strict=True)]
    joined = torch.cat(flats) if len(flats) > 1 else flats[0]
    return [joined, *reduced.errors, *(reduced.qs if how.warm_start else ())]


def _shaped(flat: Tensor, shape: Sequence[int], order: Sequence[int] | None) -> Tensor:
    """A gradient, contiguous, from its part of the bucket, where its dimensions lie in `order`."""
    if order is None:
        return flat.view(shape)
    back = [order.index(dim) for dim in range(len(order))]
    return flat.view([shape[dim] for dim in order]).permute(back).contiguous()


def _line(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 1 and tensor.is_contiguous() else tensor.reshape(-1)


def _between(first: fx.Node, last: fx.Node) -> list[fx.Node]:
    """The nodes after `first` and before `last`."""
    nodes, node = [], first.next
    while node is not last:
        nodes.append(node)
        node = node.next
    return nodes


def _unjoin(flat: fx.Node) -> None:
    """``split(cat(members))`` -> `members`: readers of single gradients need no copy."""
    if flat.target is not _aten.cat.default:
        return
    members: Any = flat.args[0]
    sizes = [node_meta.tensor(member).numel() for member in members]
    for split in [user for user in flat.users if user.target is _aten.split_with_sizes.default]:
        if list(split.args[1]) == sizes:  # type: ignore[arg-type]
            graph_edit.replace_nodes({item: members[item.args[1]] for item in split.users})
