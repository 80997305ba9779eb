"""Calls that are surely the next ones of the only path left: they are recorded in as little time as Python allows.

It says yes or does not know. What is not plain (containers among the arguments, modules that return some, tensors that
are on memory of others) goes the way of `run.py`, which decides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from wholestep.capture.guards.fast_guards import held_elsewhere
from wholestep.capture.python.user_frame import current_line
from wholestep.capture.tracing.tensor_swap import swap_contents
from wholestep.capture.wrappers.fully_shard_settings import sharded_modules
from wholestep.live.opaque.modules import FunctionCall, OpaqueModule, OpaqueModules
from wholestep.live.pieces.observation import hooks_on_gradients
from wholestep.live.pieces.pending_calls import Launcher, PendingCalls
from wholestep.live.pieces.shape_inference import resized
from wholestep.live.recording.fast_match import FastRecord
from wholestep.live.recording.handle import Handle, recording_paused
from wholestep.live.recording.modes import recordable_modes
from wholestep.live.recording.path import BACKWARDS, Path
from wholestep.live.recording.record import CONSTANT, Key, OutputMeta, Read, Record, Value, name_of
from wholestep.live.recording.snapshot import OptimizerSnapshot, OptimizerWatch
from wholestep.live.recording.structure import Structure

NOT_SURE = object()
"""Where only the long comparison can tell whether a call is a known one."""


CallWithoutTensors = tuple[Any, Structure, tuple[Any, ...]]
"""Function, structure and constants of a call, with kinds in the place of tensors and numbers."""


def without_tensors(key: Key) -> CallWithoutTensors:
    """A call as far as it is no tensors and numbers."""
    return key.function, key.structure, tuple(one if one.kind == CONSTANT else one.kind for one in key.operands)


@dataclass(frozen=True, slots=True)
class Learned:
    """What earlier calls of one live step have shown, besides its paths."""

    modules: OpaqueModules = field(default_factory=OpaqueModules)
    watches: dict[Optimizer, OptimizerWatch] = field(default_factory=dict)
    reading_calls: set[CallWithoutTensors] = field(default_factory=set)
    """Calls of torch that have given Python something other than tensors."""
    drawing_functions: set[Any] = field(default_factory=set)
    """Functions of torch that have drawn random numbers without any tensor of the step."""
    making_functions: set[Any] = field(default_factory=set)
    """Those that have made, of data alone, what a later call put into a graph: ``out`` of ``out[i] = model(x)``."""


class FollowedCalls(PendingCalls, ABC):
    """The calls of one run, of which those that follow the only path left are recorded quickly."""

    def __init__(
        self,
        paths: Iterable[Path],
        arguments: Iterable[Any],
        launch: Launcher,
        learned: Learned,
        agree_on_gradients: Callable[[], bool] | None = None,
    ) -> None:
        """Takes what `PendingCalls` does, and what earlier calls of the step have shown."""
        super().__init__(paths, arguments, launch, agree_on_gradients)
        self._learned = learned
        self.backward_at = 0
        """How many calls were recorded before the last backward that is no record."""
        self.made_modules: WeakSet[nn.Module] = WeakSet()
        """Those that this call has made. Another call makes others, so their own Python runs: no record is of them."""
        self._resharded: dict[int, int] = {}
        """Likewise of ``reshard()``, by id of the module."""

    def note_made(self, module: nn.Module) -> None:
        """The step has made a module."""
        self.made_modules.add(module)

    def leave_path(self, function: Any, why: str) -> None:
        """A function is about to be executed without a record."""
        self._flush(why)
        self.make_no_path(why)
        if function in BACKWARDS:
            self.backward_at = len(self.records)

    def call_of(self, function: type[torch.autograd.Function]) -> FunctionCall | None:
        """The module whose call is that of a function; None if the step makes the function itself."""
        with recording_paused():
            return self._learned.modules.call_of(function)

    def note_reshard(self, module: FSDPModule) -> None:
        """A module of ``fully_shard`` is told to drop what it has gathered."""
        self._resharded[id(module)] = len(self.records)

    def gathering(self) -> list[FSDPModule]:
        """Modules of ``fully_shard`` that were called, as a record, since the last backward and their ``reshard()``."""
        functions = [record.key.function for record in self.records]
        since = max((place for place, one in enumerate(functions) if one in BACKWARDS), default=0)
        found = dict[int, FSDPModule]()
        for place in range(max(since, self.backward_at), len(functions)):
            if isinstance(called := functions[place], OpaqueModule):
                parts = sharded_modules([called.module])
                found.update((id(one), one) for one in parts if self._resharded.get(id(one), 0) <= place)
        return list(found.values())

    def _followed(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the next record gives, or the value that is read next, if this call is surely that; else NOT_SURE."""
        number, tensors = len(self.records), self.tensors
        if len(self.candidates) != 1 or self._speculation is not None or tensors.exposed:
            return NOT_SURE
        path = self.candidates[0]
        fast = path.fast_records[number]
        if fast is None or fast.function != function:
            return self._followed_read(path, function, args, kwargs)
        if len(args) != fast.num_args or tuple(kwargs) != fast.names or fast.modes != recordable_modes():
            return NOT_SURE
        leaves = (*args, *kwargs.values()) if kwargs else args
        if number in path.sized or not fast.is_plain:
            return self._followed_long(path, fast, leaves)
        if not tensors.matches(path, fast, leaves):
            return NOT_SURE
        self.records.append(fast.record)
        return None if fast.output is None else self._handle_of((number, 0), fast.output)

    def _followed_read(self, path: Path, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number = len(self.records)
        read = path.read_at(number, function)
        if read is None or len(args) != 1 or type(args[0]) is not Handle or kwargs or recordable_modes() is None:
            return NOT_SURE
        is_record = number < len(path.records) and path.records[number].key.function == function
        return NOT_SURE if is_record or self.tensors.value_of(args[0]) is None else self._read_here(read, args[0])

    def _followed_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call of a module gives if it is surely the next record; else NOT_SURE."""
        if len(self.candidates) != 1 or self._speculation is not None or self.tensors.exposed:
            return NOT_SURE
        path, number = self.candidates[0], len(self.records)
        fast = path.fast_records[number]
        if fast is None or fast.module is not module:
            return NOT_SURE
        if kwargs or len(args) != fast.num_args or fast.names or fast.modes != recordable_modes():
            return NOT_SURE
        # Where sizes do not move, arguments that match have those of the recorded call.
        is_known = fast.function.holds(args, kwargs) if number in path.sized else fast.function.is_as_it_was()
        return self._followed_long(path, fast, args) if is_known else NOT_SURE

    @abstractmethod
    def _read_here(self, read: Read, handle: Handle) -> Any:
        """Python asks for a value where it did in an earlier run."""

    def _followed_long(self, path: Path, fast: FastRecord, leaves: Sequence[Any]) -> Any:
        """The same for a record that does more than compute tensors of known sizes: it draws, steps, goes back."""
        number, tensors, length = len(self.records), self.tensors, self.tensors.length()
        snapshot = None if fast.optimizer is None else self._watch(fast.optimizer).snapshot()
        if snapshot is not None and (
            snapshot.num_entries != fast.record.state_entries or self._is_stepped_otherwise(snapshot)
        ):
            return NOT_SURE
        if not tensors.matches(path, fast, leaves):
            return NOT_SURE
        record = resized(path, number, self.records, tensors)
        if isinstance(record, str) or not self._may_follow(record):
            tensors.forget_since(length)
            return NOT_SURE
        self._draws.take(record.drawn)
        if fast.module is not None:
            tensors.add_module(fast.function)
        if snapshot is not None:
            self.snapshots[number] = snapshot
            tensors.note_state(snapshot)
        self.take(record)
        output = record.outputs[0]
        result = None if output is None else self._handle_of((number, 0), output)
        self._run_what_others_see(record)
        return result

    def _handle_of(self, value: Value, meta: OutputMeta) -> torch.Tensor:
        """The handle of what a record gives: that of the value which it gives again, where somebody holds it."""
        known = None if meta.again is None else self.tensors.if_alive(meta.again)
        return self.tensors.note_value(known if type(known) is Handle else self._made(meta), value)

    def _joined(self, tensor: torch.Tensor, meta: OutputMeta, value: Value) -> torch.Tensor:
        """An argument in place that the call puts into a graph: the same object, as another value."""
        was, other = self.tensors.value_of(tensor), self._made(meta)
        assert was is not None
        is_pending = type(tensor) is Handle
        swap_contents(tensor, other)
        if not is_pending:  # `other` is now what the piece is given
            tensor.__class__, other.__class__ = Handle, torch.Tensor
            vars(tensor)["run"] = vars(other).pop("run")
            self._given.append(self.tensors.note_value(other, was))
        return self.tensors.note_value(tensor, value)

    def _may_follow(self, record: Record) -> bool:
        """Whether nothing has happened for which a record has to wait until others have run, or is none."""
        if not self._draws.go_on(record.drawn):
            return False
        return record.key.function not in BACKWARDS or not hooks_on_gradients(record.key.function, self.tensors)

    def _run_what_others_see(self, record: Record) -> None:
        """Runs what is recorded, up to this call, if it writes to memory of an array: who reads that is not seen."""
        snapshot = self.snapshots.get(len(self.records) - 1)
        if snapshot is not None:
            is_seen = held_elsewhere(snapshot.params) or held_elsewhere(snapshot.tensors, loaded=True)
        else:
            is_seen = record.key.function in BACKWARDS and held_elsewhere(self.tensors.gradients())
        if is_seen:
            self._run_pending(f"{name_of(record.key.function)} writes to memory that an array shares")

    def _is_changed(self, function: Any, leaves: list[Any]) -> bool:
        """Whether a module or an optimizer is in another state than a call of it that was recorded and has not run."""
        if isinstance(function, OpaqueModule):
            return any(
                self._is_called_otherwise(number, function) for number in range(self._started, len(self.records))
            )
        steps = (leaf for leaf in leaves if isinstance(leaf, Optimizer))
        return any(self._is_stepped_otherwise(self._watch(one).snapshot()) for one in steps)

    def _is_called_otherwise(self, number: int, function: OpaqueModule) -> bool:
        """Whether a record is a call of the same module whose Python would be another one now, not for flags alone."""
        one = self.records[number].key.function
        if not isinstance(one, OpaqueModule) or one.module is not function.module or one is function:
            return False
        with self.tensors.flags.before(number):
            return not one.is_as_it_was()

    def _run_for_peers(self, function: Any) -> None:
        """Runs what is recorded before a function that waits for other ranks: one may be in a piece that it has asked a
        value of, and that waits for all."""
        if self._started < len(self.records):
            self.reads.add(Read(len(self.records), function, current_line()))
            self._run_pending(f"{name_of(function)} waits for other ranks")

    def _is_stepped_otherwise(self, now: OptimizerSnapshot) -> bool:
        """Whether a step of an optimizer was recorded, and has not run, that was in another state than now."""
        return any(
            taken.optimizer is now.optimizer and taken is not now and not taken.equals(now)
            for number, taken in self.snapshots.items()
            if number >= self._started
        )

    def _watch(self, optimizer: Optimizer) -> OptimizerWatch:
        watches = self._learned.watches
        if optimizer not in watches:
            watches[optimizer] = OptimizerWatch(optimizer)
        return watches[optimizer]
