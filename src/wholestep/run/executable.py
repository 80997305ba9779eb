"""A lowered program tied to the user's live objects: what a call runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from wholestep.capture.binding import Binding
from wholestep.program.program import InputKind, MeshAxis, OutputKind, Program
from wholestep.run.watch import named_failures
from wholestep.run.world import World

Runner = Callable[[list[Any]], tuple[Any, ...]]


class Executable:
    """Calls a lowered program: fills in the inputs that move, runs, and puts gradients and results back."""

    def __init__(self, program: Program, binding: Binding, runner: Runner, world: World, name: str) -> None:
        self.program, self.binding = program, binding
        self._runner, self._world, self._name = runner, world, name
        self._calls = 0
        self._late_writes = late_writes(program)

    def __call__(self, leaves: list[Any]) -> Any:
        """One step. `leaves` are the flat arguments.

        Raises:
            RankMissingError: a collective failed because a rank died or hung; nothing was written then.
        """
        inputs = self.binding.inputs(leaves)
        self._calls += 1
        with torch.no_grad():
            if self._world.size == 1:
                outputs = self._runner(inputs)
            else:
                with named_failures(self._world, self._where):
                    outputs = self._runner(inputs)
            for target, place in self._late_writes:
                inputs[target].copy_(outputs[place])
        return self.binding.finish(outputs)

    def _where(self) -> str:
        return f"{self._name}, call {self._calls}"


def late_writes(program: Program) -> list[tuple[int, int]]:
    """(input, output) pairs of the writes that the lowered program returns instead of doing them itself."""
    pairs = zip(program.outputs, program.results, strict=True)
    return [
        (output.target, place)
        for place, (output, result) in enumerate(pairs)
        if output.kind is OutputKind.WRITE and output.target is not None and result is not None
    ]


def make_equal(tensors: Iterable[torch.Tensor], axis: MeshAxis, done: WeakValueDictionary[int, torch.Tensor]) -> None:
    """Gives `tensors` the values of the axis's first rank, one message per dtype, as DistributedDataParallel does.

    Tensors in `done` were made equal before and are left alone; the others join it.
    """
    group = dist.distributed_c10d._resolve_process_group(axis.group)
    source = dist.get_global_rank(group, 0)
    fresh = [t for t in tensors if id(t) not in done]
    by_dtype: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in fresh:
        by_dtype.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        done[id(tensor)] = tensor
    with torch.no_grad():
        for same in by_dtype.values():
            flat = torch.cat([t.detach().reshape(-1) for t in same])
            dist.broadcast(flat, source, group=group)
            for tensor, part in zip(same, flat.split([t.numel() for t in same]), strict=True):
                tensor.detach().copy_(part.view(tensor.shape))


def describe_state(program: Program) -> str:
    """The parameters and buffers of a program, a line each: what ranks compare besides the schedule."""
    lines = [
        f"{record.kind.value} {record.name} {str(record.dtype).removeprefix('torch.')}{list(record.shape)}"
        f"{' trainable' if record.trainable else ''}"
        for record in program.inputs
        if record.kind in (InputKind.PARAM, InputKind.BUFFER)
    ]
    return "\n".join(lines) + "\n"
