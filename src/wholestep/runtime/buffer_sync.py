"""Makes state equal on all ranks: all of it before the first step, later the buffers that other steps wrote."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from wholestep.capture.functionalize.storage_resize import is_freed
from wholestep.capture.wrappers.ddp import written_by_themselves
from wholestep.config import DataParallelOptions
from wholestep.ir.ops.collectives import group_named
from wholestep.ir.program import InputKind, MeshAxis, OutputKind, Program
from wholestep.runtime.distributed.failure_report import named_failures
from wholestep.runtime.distributed.world import World

LARGE_BYTES = 64 << 20
"""What messages took is given back from here on. An allocator keeps it for others, and of a message of 4.2 GiB they
were 32 MiB, the workspace of a library, which kept all of it from the device."""

_may_differ: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
"""Buffers that a step of this process wrote since they were last equal on all ranks, by id."""


def may_differ(buffers: Iterable[torch.Tensor]) -> None:
    """A step is about to run that may write to these buffers, the same ones on every rank."""
    _may_differ.update((id(buffer), buffer) for buffer in buffers)


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

    The graph itself broadcasts what it writes. A buffer that it only reads is broadcast here, and only when a step has
    written it since the last time, or a wrapper's own forward in eager code: constants such as masks and positions
    never travel, and of many evaluation steps in a row the first one does it. Ranks decide alike, as they run the same
    plans, and such forwards together.
    """

    def __init__(
        self, program: Program, tensors: list[torch.Tensor | int | None], axes: tuple[MeshAxis, ...],
        strategy: DataParallelOptions,
    ) -> None:  # fmt: skip
        """`tensors`: the live ones of the program's inputs. Of a step that broadcasts none, what it writes is noted."""
        targets = {output.target for output in program.outputs if output.kind is OutputKind.WRITE}
        kept = program.host_buffers
        found = [
            (index in targets, record.name, tensor)
            for index, (record, tensor) in enumerate(zip(program.inputs, tensors, strict=True))
            if record.kind is InputKind.BUFFER and index not in kept and isinstance(tensor, torch.Tensor)
        ]
        self._written = [tensor for is_written, _, tensor in found if is_written]
        self._read = [
            tensor
            for is_written, name, tensor in found
            if strategy.broadcast_buffers and not is_written and name not in strategy.ignore
        ]
        self._axes = axes

    def before_call(self) -> None:
        """Broadcasts what this step reads and another has written, or a wrapper's own forward; notes what this step is
        about to write."""
        may_differ(written_by_themselves())
        stale = [tensor for tensor in self._read if id(tensor) in _may_differ] if _may_differ else []
        if stale:
            broadcast_over(stale, self._axes)
        may_differ(self._written)


def broadcast_over(tensors: list[torch.Tensor], axes: tuple[MeshAxis, ...]) -> None:
    """Gives `tensors` the values of the rank that is the first one on all axes."""
    for axis in axes:
        broadcast_tensors(tensors, axis)


def broadcast_tensors(tensors: list[torch.Tensor], axis: MeshAxis) -> None:
    """Gives `tensors` the values of the axis's first rank, one message per dtype, as DistributedDataParallel does.

    None of them is changed before all have arrived.
    """
    by_dtype: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    _in_messages([*by_dtype.values()], axis)
    for tensor in tensors:
        _may_differ.pop(id(tensor), None)
    if sum(tensor.nbytes for tensor in tensors if tensor.is_cuda) >= LARGE_BYTES:
        torch.cuda.empty_cache()


def _in_messages(contents: list[list[torch.Tensor]], axis: MeshAxis) -> None:
    """Broadcasts each list of tensors as one message, all of them before the first is read."""
    group = group_named(axis.group)
    source = dist.get_global_rank(group, 0)
    with torch.no_grad():
        sent = [torch.cat([tensor.detach().reshape(-1) for tensor in same]) for same in contents]
        for flat in sent:
            dist.broadcast(flat, source, group=group)
        for same, flat in zip(contents, sent, strict=True):
            for tensor, part in zip(same, flat.split([tensor.numel() for tensor in same]), strict=True):
                tensor.detach().copy_(part.view(tensor.shape))
