"""All-reduce by the copy engines of GPUs that see each other's memory, so that multiprocessors stay with computation.

A message is cut into pieces, and a piece into one part per rank, its owner's. For every piece::

    push    each rank copies the parts of the others into its slot in the memory of their owners
    meet    all parts have come
    add     each rank adds the slots and its own part, in the order of the ranks, into its result and its own part
    meet    all results are there
    pull    each rank copies the results of the others to where their parts were

Copies between GPUs run on their copy engines; only the addition takes multiprocessors, and nothing is copied within a
GPU. The memory of slots and results is symmetric: every rank has mapped that of all others. One of it is enough for
all messages, since they follow each other on one stream: what a rank pushes for the next piece reaches slots that their
owner has read before it met the others for the second time, and a result is written behind a first meeting, to which a
rank comes when it has pulled.

Sources: Thakur et al., "Optimization of Collective Communication Operations in MPICH", 2005 (reduce-scatter and
all-gather); PyTorch's symmetric memory, for the mapping and the meetings.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from wholestep.errors import ConfigError
from wholestep.lower.addition import add_parts
from wholestep.program.collectives import LIBRARY, averages, group_named, started_on_this_stream

PIECE_BYTES = 256 << 20
"""Of a message that travel at once. The symmetric memory of a group is this and a part more."""
_ALIGNED_BYTES = 128


class Peers(Protocol):
    """The symmetric memory of a group, as one rank sees it."""

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

    def meet(self) -> None:
        """What stands behind it runs when all ranks have come."""
        ...


Add = Callable[[Tensor, Tensor, Tensor], None]
"""``add(slots, own, result)``: the sum or the mean of the slots, of shape (ranks, elements), with ``own``, of shape
(elements), in the place of the rank's slot. It is written to ``own`` and to ``result``."""


def all_reduce(message: Tensor, peers: Peers, add: Add) -> None:
    """Gives every rank what `add` makes of the messages of all, in place. `message` has one dimension."""
    length = part_length(peers.size, message.dtype)
    memories = [peers.memory(rank, message.dtype) for rank in range(peers.size)]
    own = memories[peers.rank][: (peers.size + 1) * length].view(peers.size + 1, length)
    others = [(peers.rank + step) % peers.size for step in range(1, peers.size)]
    for parts in _cut(message, peers.size, length):
        for rank in others:
            slot = memories[rank][peers.rank * length :][: parts[rank].numel()]
            slot.copy_(parts[rank], non_blocking=True)
        peers.meet()
        mine = parts[peers.rank]
        add(own[:-1, : mine.numel()], mine, own[-1, : mine.numel()])
        peers.meet()
        for rank in reversed(others):
            result = memories[rank][peers.size * length :][: parts[rank].numel()]
            parts[rank].copy_(result, non_blocking=True)


def part_length(num_ranks: int, dtype: torch.dtype) -> int:
    """Elements of a part of the largest piece."""
    aligned = num_ranks * _ALIGNED_BYTES
    return PIECE_BYTES // aligned * _ALIGNED_BYTES // dtype.itemsize


def _cut(message: Tensor, count: int, most: int) -> Iterator[Sequence[Tensor]]:
    """The message in as few pieces as there can be, of about one size; each as one part per rank, of at most `most`.

    All parts of a message but its last ones have one aligned length; the last may be shorter, or empty.
    """
    if not message.numel():
        return
    step = _ALIGNED_BYTES // message.element_size()
    pieces = -(-message.numel() // (count * most))
    length = -(-message.numel() // (pieces * count * step)) * step
    for start in range(0, message.numel(), count * length):
        yield [message[start + rank * length :][:length] for rank in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mapped:
    """Symmetric memory of GPUs."""

    rank: int
    size: int
    handle: Any
    memories: Sequence[Tensor]
    timeout_ms: int

    def memory(self, rank: int, dtype: torch.dtype) -> Tensor:
        """See `Peers`."""
        return self.memories[rank].view(dtype)

    def meet(self) -> None:
        """See `Peers`. A rank that waits for longer than the group's timeout ends with an error of the device."""
        self.handle.barrier(0, self.timeout_ms)


class _Group:
    """What a group needs to reduce by copies, made when all its ranks do so for the first time."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group = group
        size = group.size()
        num_bytes = (size + 1) * part_length(size, torch.uint8)
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
            rank=group.rank(), size=size, handle=handle, memories=memories, timeout_ms=int(1e3 * timeout_s)
        )
        self.stream = torch.cuda.Stream(device, priority=-1)


_groups: dict[str, _Group] = {}


def _group_of(name: str, device: torch.device) -> _Group:
    """That of the group which has the name now: a process that starts anew gives the old names to new groups."""
    group, known = group_named(name), _groups.get(name)
    if known is None or known.group is not group:
        known = _groups[name] = _Group(group, device)
    return known


def _all_reduce_(message: Tensor, reduce_op: str, group: str) -> Tensor:
    """The in-place operator on a GPU: starts the reduction on a stream of its own."""
    own = _group_of(group, message.device)
    add = partial(add_parts, rank=own.peers.rank, averages=reduce_op == "avg")
    own.stream.wait_stream(torch.cuda.current_stream(message.device))
    with torch.cuda.stream(own.stream), torch.no_grad():
        all_reduce(message.view(-1), own.peers, add)
        return started_on_this_stream(message)


LIBRARY.impl("all_reduce_by_copies_", _all_reduce_, "CUDA")


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
    if count < size:
        return f"this process sees {count} of {size} GPUs"
    pairs = ((one, other) for one in range(count) for other in range(one))
    if not all(torch.cuda.can_device_access_peer(one, other) for one, other in pairs):
        return "the GPUs cannot access each other's memory"
    return ""
