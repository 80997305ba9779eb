"""All-reduce by the copy engines of GPUs that see each other's memory, so that multiprocessors stay with computation.

A message is cut into pieces, and a piece into one part per rank, its owner's. What it gives lies in its own memory,
or in that of a result of a wider type. For every piece::

    push    each rank copies the parts of the others into its slot in the memory of their owners
    add     each rank adds the slots and its own part, in the order of the ranks, into its part of the result and its
            own slot
    pull    each rank copies the results of the others to their parts of the result

Before every push and every pull but the first push all ranks meet.
Copies between GPUs run on their copy engines; only the addition and the meetings take multiprocessors, and nothing is
copied within a GPU. The memory of slots is symmetric: every rank has mapped that of all others.

Note: a pipeline
    Copies and meetings stand on one stream, the wire. There are two sets of slots, which the pieces of a message use in
    turn. Where somebody waits for pieces, additions stand on a stream of their own, and a piece is pushed before the
    previous one is pulled, so that the wire has work while ranks add (``|`` is a meeting)::

        wire    push 0 | push 1 | pull 0 | push 2 | pull 1 | push 3 | pull 2 | pull 3
        add              0        1                 2                 3

    Elsewhere additions stand on the wire, too. A fork costs more there than it gives: after each, a CUDA graph goes on
    in one more queue of the device (38 in a step of W3), and where branches share a queue, one waits for what is
    before it in there. On 4 GPUs updates of W3 stood after a meeting so, and waited for the slowest rank.

Note: rounds
    A rank copies to or from the next rank first, then the one after it, and so on. While all are in the same round,
    every link carries one copy each way, 340 to 365 GB/s on H200s. Two ranks that copy to the same one have half of
    that each, while a link elsewhere is idle. Ranks that began a message as they came to it, and met only around
    additions, drifted apart until half of their copies had 130 to 220 GB/s; all in all they took 4.1 ms in the place
    of 2.9 in a step of W1 on 4 GPUs. Copies to all others side by side made the step longer still. So ranks begin
    rounds together. Before a message they need not meet: where the wire is what the step waits for, they come from
    the message before, together.

Note: nothing is overwritten that somebody still reads
    The meeting after a push says that all parts have come, and the addition stands after it. The one before a
    pull says that all ranks have added, so after it slots are free. Nobody pushes to where an owner's sums lie: those
    it overwrites after the next meeting that follows a push, to which all come after their last pull.

Note: nothing waits for ever
    Meetings wait for other ranks, and nothing else does. They all stand on one stream, in the same order on all ranks.
    Suppose ranks stand still, and take the earliest meeting that one stands in. A rank that has not come to it stands
    in no other one, as that would be an earlier one; so it goes on, and comes. That holds for every order in which a
    device may take its work, even if it is one queue, since an order puts nothing before what it waits for; so it holds
    where a CUDA graph brings its branches to fewer queues. It would not, if meetings stood on two streams: two ranks
    could begin with different ones. Of collectives of other libraries beside it, it says nothing.

Note: CUDA graphs
    The streams branch off from the stream of the caller, and the wire waits for the last addition, so a capture is
    joined by who waits for the message. What the streams did before a capture is not part of it, and needs not be: a
    graph begins after what its stream has waited for, and that is every message of the step before, pulls included.

Sources: Thakur et al., "Optimization of Collective Communication Operations in MPICH", 2005 (reduce-scatter and
all-gather); PyTorch's symmetric memory, for the mapping and the meetings.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from wholestep.errors import ConfigError
from wholestep.ir import node_meta
from wholestep.ir.ops.collectives import (
    ALL_REDUCE_BY_COPIES_,
    ALL_REDUCE_WIDE,
    LIBRARY,
    averages,
    group_named,
    started_on_this_stream,
)
from wholestep.ir.program import Program
from wholestep.lower.codecache import triton_cache
from wholestep.lower.kernels import add_chunks
from wholestep.lower.kernels.add_chunks import add_parts

PIECE_BYTES = 160 << 20
"""The largest piece, so the bytes of a set of slots; the symmetric memory of a group is two.

A piece costs two meetings, in which the wire is idle. One takes 10 us on an idle GPU, 20 beside updates, 15 beside the
products of W1 and up to 300 beside large ones, until a multiprocessor is free, and 20 pass around it; what a megabyte
takes to be pushed and pulled among 4 GPUs is 4.3 us (350 GB/s, measured).
"""
SPLIT_BYTES = 64 << 20
"""Messages from here on travel in an even number of pieces where somebody waits for the first of two: after it, all
that an update needs to begin is there. Others are one piece, if they can: that is half as many copies, with 7 us
between them, and a meeting less."""
WIRE, ADD = 0, 1
"""Streams."""
NUM_STREAMS = 2
_ALIGNED_BYTES = 128


class Peers(Protocol):
    """The symmetric memory of a group and the streams of a rank, as that rank sees them."""

    @property
    def rank(self) -> int:
        """Of this rank in the group."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    def memory(self, rank: int, dtype: torch.dtype) -> Tensor:
        """That of a rank, in one dimension."""
        ...

    def run(self, stream: int, work: Callable[[], object]) -> None:
        """Gives work to a stream."""
        ...

    def wait(self, stream: int, other: int) -> None:
        """What `stream` is given from now on runs after what `other` has been given so far, or has waited for."""
        ...

    def meet(self, stream: int) -> None:
        """What `stream` is given from now on runs when all ranks have come to this meeting."""
        ...

    def mark(self, stream: int) -> Any:
        """An event after what `stream` has been given so far, or has waited for."""
        ...


Add = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""``add(slots, own, result, shared)``: the sum or the mean of the slots, of shape (ranks, elements), with ``own``, of
shape (elements), in the place of the rank's slot. It is written to ``result`` and ``shared``, like ``own`` but for the
type."""


Pieces = Sequence[tuple[int, Any]]
"""(elements, event): so many from the start of a result are there after this event and those before it. After the
last event all of it is, and no stream reads or writes it or the message any more."""


def all_reduce(message: Tensor, result: Tensor, peers: Peers, add: Add, *, split: bool = True) -> Pieces:
    """Gives every rank what `add` makes of the messages of all.

    The streams have waited for the message: both with `split`, else the wire. The result is there after `WIRE`.

    Args:
        message: one dimension.
        result: the message itself, or as many elements of a wider type.
        split: whether somebody waits for pieces. The same on all ranks.
    """
    size, rank = peers.size, peers.rank
    row_bytes = chunk_length(size, result.dtype) * result.itemsize
    parts = [_slots(peers, one, row_bytes, message.dtype) for one in range(size)]
    sums = [_slots(peers, one, row_bytes, result.dtype) for one in range(size)]
    others = [(rank + step) % size for step in range(1, size)]
    pieces = list[tuple[int, Any]]()
    cut = list(_cut(result, size, message.itemsize, split=split))
    came, adds = None, ADD if split else WIRE
    for number, (pushed, pulled) in enumerate(_phases(len(cut))):
        if split and pulled is not None:
            peers.wait(WIRE, ADD)
        if number:
            peers.meet(WIRE)
        if came is not None:
            own, mine = message[cut[came][rank]], result[cut[came][rank]]
            place = slice(own.numel())
            if split:
                peers.wait(ADD, WIRE)
            peers.run(adds, partial(add, parts[rank][came % 2, :, place], own, mine, sums[rank][came % 2, rank, place]))
        came = pushed
        if pushed is not None:
            for other in others:
                part = message[cut[pushed][other]]
                peers.run(WIRE, partial(copy, parts[other][pushed % 2, rank, : part.numel()], part))
        if pulled is not None:
            for other in others:
                part = result[cut[pulled][other]]
                peers.run(WIRE, partial(copy, part, sums[other][pulled % 2, other, : part.numel()]))
            pieces.append((min(cut[pulled][-1].stop, result.numel()), peers.mark(WIRE)))
    return pieces or [(0, peers.mark(WIRE))]


def _slots(peers: Peers, rank: int, row_bytes: int, dtype: torch.dtype) -> Tensor:
    """Those of a rank, of shape (2 sets, ranks, elements). A row has room for a part of a result: the owner's own one
    is where its sums are, and nobody pushes there."""
    length = row_bytes // dtype.itemsize
    return peers.memory(rank, dtype)[: 2 * peers.size * length].view(2, peers.size, length)


def _phases(num_pieces: int) -> Iterator[tuple[int | None, int | None]]:
    """The piece that is pushed, and the one that is pulled, in each phase of a message. Never both.

    A piece is added in the phase after its push, and pulled in a later one.
    """
    for piece in range(num_pieces):
        yield piece, None
        if piece:
            yield None, piece - 1
    if num_pieces == 1:
        yield None, None
    if num_pieces:
        yield None, num_pieces - 1


def copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


def chunk_length(num_ranks: int, dtype: torch.dtype) -> int:
    """Elements of a part of the largest piece."""
    aligned = num_ranks * _ALIGNED_BYTES
    return PIECE_BYTES // aligned * _ALIGNED_BYTES // dtype.itemsize


def memory_bytes(num_ranks: int) -> int:
    """Of the symmetric memory of each rank: two sets of slots."""
    return 2 * num_ranks * chunk_length(num_ranks, torch.uint8)


def _cut(result: Tensor, count: int, itemsize: int, *, split: bool) -> Iterator[Sequence[slice]]:
    """A result in as few pieces as there can be, with `split` as `SPLIT_BYTES` lets there be, of about one size; each
    as one part per rank.

    All parts of a message but its last ones have one length, aligned for elements of `itemsize` bytes; the last may be
    shorter, or empty.
    """
    if not result.numel():
        return
    step = _ALIGNED_BYTES // itemsize
    most = chunk_length(count, result.dtype) // step * step
    unit = 2 if split and result.nbytes >= SPLIT_BYTES else 1
    pieces = unit * -(-result.numel() // (unit * count * most))
    length = -(-result.numel() // (pieces * count * step)) * step
    for start in range(0, result.numel(), count * length):
        yield [slice(start + rank * length, start + (rank + 1) * length) for rank in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mapped:
    """Symmetric memory of GPUs, and streams of this one."""

    rank: int
    size: int
    handle: Any
    memories: Sequence[Tensor]
    streams: Sequence[torch.cuda.Stream]
    timeout_ms: int

    def memory(self, rank: int, dtype: torch.dtype) -> Tensor:
        """See `Peers`."""
        return self.memories[rank].view(dtype)

    def run(self, stream: int, work: Callable[[], object]) -> None:
        """See `Peers`."""
        with torch.cuda.stream(self.streams[stream]):
            work()

    def wait(self, stream: int, other: int) -> None:
        """See `Peers`."""
        self.streams[stream].wait_stream(self.streams[other])

    def meet(self, stream: int) -> None:
        """See `Peers`. A rank that waits for longer than the group's timeout ends with an error of the device."""
        self.run(stream, partial(self.handle.barrier, 0, self.timeout_ms))

    def mark(self, stream: int) -> torch.cuda.Event:
        """See `Peers`."""
        event: torch.cuda.Event = self.streams[stream].record_event()
        return event


class _Group:
    """What a group needs to reduce by copies, made when all its ranks do so for the first time."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group = group
        size = group.size()
        num_bytes = memory_bytes(size)
        try:
            memory = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
            handle = symmetric_memory.rendezvous(memory, group)
            memories = [handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(size)]
        except RuntimeError as error:
            raise ConfigError(
                f"The GPUs of group {group.group_name} cannot map each other's memory "
                f"({str(error).splitlines()[0]}), which reductions by copy engines need. "
                f"Use ws.Inductor(copy_engines=False)."
            ) from error
        timeout_s = group._get_backend(device).options._timeout.total_seconds()
        self.peers = _Mapped(
            rank=group.rank(), size=size, handle=handle, memories=memories, timeout_ms=int(1e3 * timeout_s),
            streams=[torch.cuda.Stream(device, priority=-1) for _ in range(NUM_STREAMS)],
        )  # fmt: skip


_groups: dict[str, _Group] = {}


def group_of(name: str, device: torch.device) -> _Group:
    """That of the group which has the name now: a process that starts anew gives the old names to new groups."""
    group, known = group_named(name), _groups.get(name)
    if known is None or known.group is not group:
        known = _groups[name] = _Group(group, device)
    return known


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingMessage:
    """A message that is being reduced."""

    message: Tensor
    """What is read until the last piece is there."""
    result: Tensor
    pieces: Pieces


def start(message: Tensor, reduce_op: str, group: str, *, split: bool = True) -> PendingMessage:
    """Starts to reduce a contiguous tensor of a GPU, in place, on streams of their own; "sum" or "avg".

    `split`: whether somebody waits for its pieces.
    """
    return _start(message, message, reduce_op, group, split=split)


def start_wide(
    message: Tensor, reduce_op: str, dtype: torch.dtype, group: str, *, split: bool = True
) -> PendingMessage:
    """The same of half precision, added in `dtype` and given in it."""
    return _start(message, torch.empty_like(message, dtype=dtype), reduce_op, group, split=split)


def _start(message: Tensor, result: Tensor, reduce_op: str, group: str, *, split: bool) -> PendingMessage:
    peers = group_of(group, message.device).peers
    add = partial(add_parts, rank=peers.rank, averages=reduce_op == "avg")
    for stream in (WIRE, ADD) if split else (WIRE,):
        peers.streams[stream].wait_stream(torch.cuda.current_stream(message.device))
    with torch.no_grad():
        pieces = all_reduce(message.view(-1), result.view(-1), peers, add, split=split)
    return PendingMessage(message=message, result=result, pieces=pieces)


def _started(arriving: PendingMessage, group: str) -> Tensor:
    """The result, of which ``wait_tensor`` knows what to wait for."""
    with torch.cuda.stream(group_of(group, arriving.result.device).peers.streams[WIRE]):
        return started_on_this_stream(arriving.result, arriving.message)


def _all_reduce_(message: Tensor, op: str, group: str) -> Tensor:
    return _started(start(message, op, group, split=False), group)


def _all_reduce_wide(message: Tensor, op: str, dtype: torch.dtype, group: str) -> Tensor:
    return _started(start_wide(message, op, dtype, group, split=False), group)


LIBRARY.impl("all_reduce_by_copies_", _all_reduce_, "CUDA")
LIBRARY.impl("all_reduce_wide_by_copies", _all_reduce_wide, "CUDA")

STARTS: Mapping[Any, Callable[..., PendingMessage]] = {ALL_REDUCE_BY_COPIES_: start, ALL_REDUCE_WIDE: start_wide}
"""What starts the reductions of a scheduled program, and does not wait."""


def builds(program: Program) -> Iterator[triton_cache.Job]:
    """What has Triton compile the additions of a program's messages."""
    starts = (node for target in STARTS for node in program.graph.find_nodes(op="call_function", target=target))
    wanted = (
        (node_meta.tensor(one.args[0]).dtype, node_meta.tensor(one).dtype, one.args[1], one.args[-1]) for one in starts
    )
    for dtype, wide, reduce_op, name in dict.fromkeys(wanted):
        group = group_named(name)
        yield add_chunks.build(dtype, wide, size=group.size(), rank=group.rank(), averages=reduce_op == "avg")


def why_not(group: str, device: torch.device) -> str:
    """Why tensors of a device cannot be reduced by copies in this group; empty if they can. The same on every rank."""
    if not averages(group, device):
        return "the group does not use NCCL"
    if torch.version.cuda is None:
        return "this build of torch is not for CUDA"
    size, local = group_named(group).size(), int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if local != int(os.environ.get("WORLD_SIZE", "-1")):
        return "ranks are on several hosts, or nobody says that they are on one (LOCAL_WORLD_SIZE)"
    count = torch.cuda.device_count()
    shared = os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"  # torch maps memory within a GPU, too
    if count < size and not shared:
        return f"this process sees {count} of {size} GPUs"
    pairs = ((one, other) for one in range(count) for other in range(one))
    if not all(torch.cuda.can_device_access_peer(one, other) for one, other in pairs):
        return "the GPUs cannot access each other's memory"
    return ""
