"""A lowered program tied to the user's live objects: what a call runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wholestep.capture.bind.binding import Binding
from wholestep.capture.guards import fast_guards
from wholestep.errors import RankMissingError
from wholestep.ir.program import InputKind, Program
from wholestep.passes.analysis.write_order import writes_during_communication
from wholestep.runtime.buffer_sync import BufferSync
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
        buffer_sync: BufferSync | None = None,
    ) -> None:
        """`call` says the name of a call while it runs, the same on every rank: ``train_step, call 7``."""
        self.program, self.binding = program, binding
        self.runner, self._world, self._buffer_sync, self._call_name = runner, world, buffer_sync, call
        self._inputs: fast_guards.InputFiller = binding.filler()
        self._writes_early = writes_during_communication(program)
        self._timer: StepTimer | None = None
        self.measured: StepTimes | None = None
        """Times that `measure` has taken; None until it has timed enough calls."""

    def measure(self, num_calls: int, lower: Callable[[Wait], Runner]) -> None:
        """Times the next calls, after one that is not; see `StepTimer`."""
        self._timer = StepTimer(num_calls, self._world.device, lower)

    @property
    def is_measured(self) -> bool:
        """Whether calls are being timed."""
        return self._timer is not None

    def run(self) -> fast_guards.FastRun | None:
        """The parts of a call for the native fast call; None while calls are measured."""
        if self._timer is not None:
            return None
        if isinstance(self._inputs, fast_guards.PythonInputFiller):  # the native ones may have come
            self._inputs = self._inputs.native()
        finish = None if self.binding.only_returns else self.binding.finish
        return fast_guards.FastRun(inputs=self._inputs, function=self._function(), finish=finish)

    def _function(self) -> fast_guards.Function:
        return self.binding.around(self.runner if self._world.size == 1 else self._run_with_peers)

    def _run_with_peers(self, inputs: list[Any]) -> tuple[Any, ...]:
        """The step among other ranks."""
        try:
            with named_failures(self._world, self._call_name):
                if self._buffer_sync is not None:
                    self._buffer_sync.before_call()
                return self.runner(inputs)
        except RankMissingError as error:
            raise (RankMissingError(f"{error}\n{_WRITTEN}") if self._writes_early else error) from error.__cause__

    def _timed(self, timer: StepTimer, call: Callable[[], Any]) -> Any:
        """One step on the runner of the meter."""
        runner, self.runner, self._timer = self.runner, timer.runner, None
        try:
            result = timer.time(call)
        finally:
            self.runner = runner
            self._timer = timer
        if (measured := timer.measured) is not None:
            self.measured, self._timer = measured, None
        return result

    def __call__(self, leaves: list[Any]) -> Any:
        """One step. `leaves`: the flat arguments.

        Raises:
            RankMissingError: a collective failed because a rank died or hung. It says whether parameters may have
                been updated in part by then (see ``DDP(hold_updates=True)``).
        """
        if self._timer is not None:
            return self._timed(self._timer, lambda: self(leaves))
        return self.binding.finish(self._inputs.run(self._function(), leaves))


def describe_state(program: Program) -> str:
    """The parameters and buffers of a program, a line each: what ranks compare besides the schedule."""
    lines = [
        f"{record.kind.value} {record.name} {str(record.dtype).removeprefix('torch.')}{list(record.shape)}"
        f"{' trainable' if record.trainable else ''}"
        for record in program.inputs
        if record.kind in (InputKind.PARAM, InputKind.BUFFER)
    ]
    return "\n".join(lines) + "\n"
