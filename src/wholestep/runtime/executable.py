"""A lowered program tied to the user's live objects: what a call runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from wholestep.capture.bind.binding import Binding
from wholestep.capture.guards import fast_guards
from wholestep.errors import RankMissingError
from wholestep.ir.ops.collectives import group_named
from wholestep.ir.program import InputKind, MeshAxis, OutputKind, Program
from wholestep.passes.analysis.write_order import writes_beside_communication
from wholestep.runtime.distributed.failure_report import named_failures
from wholestep.runtime.distributed.world import World
from wholestep.runtime.step_timer import Runner, StepTimer, StepTimes, Wait

_WRITTEN = (
    "The step updates parameters beside its communication, so some of them and of their optimizer state may hold new "
    "values and others old ones: load a checkpoint before going on. With DDP(hold_updates=True) a step that loses a "
    "rank leaves everything as it was."
)


class Executable:
    """Calls a lowered program: fills in the inputs that move, runs, and puts gradients and results back."""

    def __init__(
        self,
        program: Program,
        binding: Binding,
        runner: Runner,
        world: World,
        *,
        call: Callable[[], str],
        buffers: BufferSync | None = None,
    ) -> None:
        """`call` says the name of a call while it runs, the same on every rank: ``train_step, call 7``."""
        self.program, self.binding = program, binding
        self.runner, self._world, self._buffers, self._name = runner, world, buffers, call
        self._inputs: fast_guards.InputFiller = binding.source()
        self._writes_early = writes_beside_communication(program)
        self._meter: StepTimer | None = None
        self.measured: StepTimes | None = None
        """What `measure` has seen; None until it has seen enough."""

    def measure(self, num_calls: int, lower: Callable[[Wait], Runner]) -> None:
        """Times the next calls, behind one that is not; see `StepTimer`."""
        self._meter = StepTimer(num_calls, self._world.device, lower)

    def run(self) -> fast_guards.FastRun | None:
        """What a call does, once there has been one; None while calls are measured."""
        if self._meter is not None:
            return None
        if isinstance(self._inputs, fast_guards.PythonInputFiller):  # the native ones may have come
            self._inputs = self._inputs.native()
        finish = None if self.binding.is_plain else self.binding.finish
        return fast_guards.FastRun(inputs=self._inputs, function=self._function(), finish=finish)

    def _function(self) -> fast_guards.Function:
        return self.binding.keeping(self.runner if self._world.size == 1 else self._watched)

    def _watched(self, inputs: list[Any]) -> tuple[Any, ...]:
        """The step among other ranks."""
        try:
            with named_failures(self._world, self._name):
                if self._buffers is not None:
                    self._buffers.before_call()
                return self.runner(inputs)
        except RankMissingError as error:
            raise (RankMissingError(f"{error}\n{_WRITTEN}") if self._writes_early else error) from error.__cause__

    def _timed(self, meter: StepTimer, leaves: list[Any]) -> Any:
        """One step on the runner of the meter."""
        runner, self.runner, self._meter = self.runner, meter.runner, None
        try:
            result = meter.time(lambda: self(leaves))
        finally:
            self.runner = runner
            self._meter = meter
        if (measured := meter.measured) is not None:
            self.measured, self._meter = measured, None
        return result

    def __call__(self, leaves: list[Any]) -> Any:
        """One step. `leaves` are the flat arguments.

        Raises:
            RankMissingError: a collective failed because a rank died or hung. It says whether parameters may have
                been updated in part by then (see ``DDP(hold_updates=True)``).
        """
        if self._meter is not None:
            return self._timed(self._meter, leaves)
        return self.binding.finish(self._inputs.run(self._function(), leaves))


_may_differ: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
"""Buffers that a step of this process wrote since they were last equal on all ranks, by id."""


class BufferSync:
    """Keeps the buffers of a data-parallel step as DistributedDataParallel does: rank 0's values at the start.

    The graph itself broadcasts what it writes. A buffer that it only reads is broadcast here, and only when a
    step has written it since the last time: constants such as masks and positions never travel, and of many
    evaluation steps in a row the first one does it. Ranks decide alike, as they run the same plans.
    """

    def __init__(self, program: Program, tensors: list[torch.Tensor | int | None], axis: MeshAxis) -> None:
        targets = {output.target for output in program.outputs if output.kind is OutputKind.WRITE}
        kept = program.host_buffers
        found = [
            (index in targets, tensor)
            for index, (record, tensor) in enumerate(zip(program.inputs, tensors, strict=True))
            if record.kind is InputKind.BUFFER and index not in kept and isinstance(tensor, torch.Tensor)
        ]
        self._written = [tensor for is_written, tensor in found if is_written]
        self._read = [tensor for is_written, tensor in found if not is_written]
        self._axis = axis

    def before_call(self) -> None:
        """Broadcasts what this step reads and another has written; notes what this step is about to write."""
        stale = [tensor for tensor in self._read if id(tensor) in _may_differ] if _may_differ else []
        if stale:
            broadcast_tensors(stale, self._axis)
        for tensor in self._written:
            _may_differ[id(tensor)] = tensor


def broadcast_tensors(tensors: list[torch.Tensor], axis: MeshAxis) -> None:
    """Gives `tensors` the values of the axis's first rank, one message per dtype, as DistributedDataParallel does.

    None of them is changed before all have arrived.
    """
    group = group_named(axis.group)
    source = dist.get_global_rank(group, 0)
    by_dtype: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    with torch.no_grad():
        sent = [(same, torch.cat([t.detach().reshape(-1) for t in same])) for same in by_dtype.values()]
        for _, flat in sent:
            dist.broadcast(flat, source, group=group)
        for same, flat in sent:
            for tensor, part in zip(same, flat.split([t.numel() for t in same]), strict=True):
                tensor.detach().copy_(part.view(tensor.shape))
                _may_differ.pop(id(tensor), None)


def describe_state(program: Program) -> str:
    """The parameters and buffers of a program, a line each: what ranks compare besides the schedule."""
    lines = [
        f"{record.kind.value} {record.name} {str(record.dtype).removeprefix('torch.')}{list(record.shape)}"
        f"{' trainable' if record.trainable else ''}"
        for record in program.inputs
        if record.kind in (InputKind.PARAM, InputKind.BUFFER)
    ]
    return "\n".join(lines) + "\n"
