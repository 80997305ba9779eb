"""Makes state equal on all ranks: all of it before the first step, later the buffers that other steps wrote."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from wholestep.capture.functionalize.storage_resize import is_freed
from wholestep.ir.ops.collectives import group_named
from wholestep.ir.program import InputKind, MeshAxis, OutputKind, Program
from wholestep.runtime.distributed.failure_report import named_failures
from wholestep.runtime.distributed.world import World

MESSAGE_BYTES = 64 << 20
"""Tensors travel together up to here. An allocator keeps the memory of a message for others, and cannot give it back
while one of them is in use: of a message of all state, 4.2 GiB, 32 MiB were, for the workspace of a library."""

_may_differ: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
"""Buffers that a step of this process wrote since they were last equal on all ranks, by id."""


class StateBroadcast:
    """Gives tensors of the state the values of the first rank, each tensor once."""

    def __init__(self, name: str) -> None:
        """`name` of the step, for messages."""
        self._name = name
        self._equal: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()

    def __call__(self, tensors: Iterable[torch.Tensor], axes: tuple[MeshAxis, ...], world: World) -> None:
        fresh = [tensor for tensor in tensors if id(tensor) not in self._equal and not is_freed(tensor)]
        with named_failures(world, lambda: f"the first broadcast of {self._name}"):
            broadcast_over(fresh, axes)
        self._equal.update({id(tensor): tensor for tensor in fresh})


class BufferSync:
    """Keeps the buffers of a data-parallel step as DistributedDataParallel does: rank 0's values at the start.

    The graph itself broadcasts what it writes. A buffer that it only reads is broadcast here, and only when a
    step has written it since the last time: constants such as masks and positions never travel, and of many
    evaluation steps in a row the first one does it. Ranks decide alike, as they run the same plans.
    """

    def __init__(self, program: Program, tensors: list[torch.Tensor | int | None], axes: tuple[MeshAxis, ...]) -> None:
        targets = {output.target for output in program.outputs if output.kind is OutputKind.WRITE}
        kept = program.host_buffers
        found = [
            (index in targets, tensor)
            for index, (record, tensor) in enumerate(zip(program.inputs, tensors, strict=True))
            if record.kind is InputKind.BUFFER and index not in kept and isinstance(tensor, torch.Tensor)
        ]
        self._written = [tensor for is_written, tensor in found if is_written]
        self._read = [tensor for is_written, tensor in found if not is_written]
        self._axes = axes

    def before_call(self) -> None:
        """Broadcasts what this step reads and another has written; notes what this step is about to write."""
        stale = [tensor for tensor in self._read if id(tensor) in _may_differ] if _may_differ else []
        if stale:
            broadcast_over(stale, self._axes)
        for tensor in self._written:
            _may_differ[id(tensor)] = tensor


def broadcast_over(tensors: list[torch.Tensor], axes: tuple[MeshAxis, ...]) -> None:
    """Gives `tensors` the values of the rank that is the first one on all axes."""
    for axis in axes:
        broadcast_tensors(tensors, axis)


def broadcast_tensors(tensors: list[torch.Tensor], axis: MeshAxis) -> None:
    """Gives `tensors` the values of the axis's first rank, many in a message, as DistributedDataParallel does.

    None of them is changed before all have arrived.
    """
    group = group_named(axis.group)
    source = dist.get_global_rank(group, 0)
    with torch.no_grad():
        sent = [(same, torch.cat([t.detach().reshape(-1) for t in same])) for same in messages(tensors)]
        for _, flat in sent:
            dist.broadcast(flat, source, group=group)
        for same, flat in sent:
            for tensor, part in zip(same, flat.split([t.numel() for t in same]), strict=True):
                tensor.detach().copy_(part.view(tensor.shape))
                _may_differ.pop(id(tensor), None)


def messages(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The tensors by dtype and device, in lists of at most `MESSAGE_BYTES`, or of one that is larger."""
    by_dtype: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in by_dtype.values():
        message, num_bytes = list[torch.Tensor](), 0
        for tensor in same:
            if message and num_bytes + tensor.nbytes > MESSAGE_BYTES:
                yield message
                message, num_bytes = [], 0
            message.append(tensor)
            num_bytes += tensor.nbytes
        yield message
