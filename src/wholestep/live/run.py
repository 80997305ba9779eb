"""One call of a live step: its Python runs, its tensor calls are executed and noted, or recorded and run as pieces.

[Note: observing and following]
A run *observes* as long as it makes calls that no earlier run made: each one is executed at once, as in eager code, and
noted. A run *follows* while its calls are those of a known path: they return handles, and nothing is executed. Where
Python asks for a value, and at the end of the step, what has been recorded runs as one compiled piece. If it can be no
piece, its records are executed one by one, and the run observes from there on. So whatever happens the results are
those of eager code; paths only decide how fast they come.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from wholestep.capture.python.user_frame import current_line
from wholestep.live.handle import CURRENT, Handle, fulfil, made, with_freed_graph
from wholestep.live.observation import execute, hooks_on_gradients, observe, unknown_argument
from wholestep.live.piece import PieceSpec
from wholestep.live.recorded_calls import RecordedCalls
from wholestep.live.recording.metadata import METADATA
from wholestep.live.recording.modes import current_modes, why_not_recordable
from wholestep.live.recording.observer import Draws, DrawWatch
from wholestep.live.recording.path import Path, Value
from wholestep.live.recording.record import (
    CONSTANT,
    EXTERNAL,
    Key,
    Read,
    Record,
    name_of,
)
from wholestep.live.recording.snapshot import OptimizerSnapshot
from wholestep.live.recording.structure import flatten, unflatten
from wholestep.live.speculation import Before, SpeculativeBackward, plan_speculation

_reading_calls: set[Any] = set()
"""Calls of torch that have given Python something other than tensors, by function and what is no tensor in them."""
_drawing_functions: set[Any] = set()
"""Functions of torch that have drawn random numbers without any tensor of the step."""


class Launcher(Protocol):
    """Runs records as a compiled piece."""

    def __call__(self, run: Run, spec: PieceSpec) -> list[torch.Tensor] | None:
        """What the piece gives; None where these records can be no piece, and nothing has run."""


class Run(RecordedCalls):
    """One call of a live step."""

    def __init__(
        self,
        paths: Iterable[Path],
        arguments: Iterable[Any],
        launch: Launcher,
        *,
        agree_on_gradients: Callable[[], bool] | None = None,
    ) -> None:
        """`arguments` are the flat arguments of the step. `launch` compiles and runs pieces.

        `agree_on_gradients`, where pieces reduce gradients over ranks: whether all ranks have come to the backward
        whose gradients they hold.
        """
        super().__init__(arguments)
        self.candidates = list(paths)
        """Known paths that agree with this run so far, while it follows them."""
        self.refused = ""
        """Why records of this run could be no piece."""
        self.pieces: list[tuple[int, int]] = []
        """Spans of records that ran as pieces."""
        self._launch = launch
        self._lock = threading.RLock()
        """Held while something is recorded or runs: another thread may have been given a handle."""
        self._given: list[torch.Tensor] = []
        """Tensors that calls which have not run are given. (Handles are held by Python alone: those that nobody holds
        when the calls run are no results.)"""
        self._agree_on_gradients = agree_on_gradients
        self._speculation: SpeculativeBackward | None = None
        self._started = 0
        """Records before this one have run."""

    def called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a torch function by the step's own Python."""
        with torch._C.DisableTorchFunction():
            if function in METADATA:
                return function(*args, **kwargs)
            with self._lock:
                CURRENT.run = None
                try:
                    fast = self._followed_fast(function, args, kwargs)
                    return self._called(function, args, kwargs) if fast is None else fast
                finally:
                    CURRENT.run = self

    def unrecorded(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], why: str) -> Any:
        """A call that does more than its arguments say: it is executed at once, and the run makes no path."""
        with self._lock, _no_current_run(), torch._C.DisableTorchFunction():
            return self._unrecorded(function, args, kwargs, why)

    def flush(self, why: str) -> None:
        """Runs what is recorded, one by one; the run observes from here on."""
        with self._lock, _no_current_run(), torch._C.DisableTorchFunction():
            self._flush(why)

    def finish(self) -> None:
        """The step has returned: what is still recorded runs."""
        with self._lock, _no_current_run(), torch._C.DisableTorchFunction():
            self._run_pending("the step ends")
            self._end_speculation()

    def _called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves: list[Any] = []
        structure = flatten((args, kwargs), leaves)
        draws = bool(self.records) and function in _drawing_functions
        if not (draws or self.tensors.is_involved(leaves)):
            return self._at_once(function, args, kwargs, leaves)
        why = (
            why_not_recordable()
            or unknown_argument(function, leaves, self.tensors)
            or hooks_on_gradients(function, self.tensors)
        )
        if why:
            return self._unrecorded(function, args, kwargs, why)
        length = self.tensors.length()
        self.tensors.copies_shared = bool(self.candidates)
        key = Key(function, structure, tuple(map(self.tensors.operand, leaves)), current_modes())
        if self.candidates:
            record = self._next_record(key)
            if record is not None and not self._makes_state(record, leaves):
                return self._recorded(record, args, kwargs, leaves)
            if record is None and self._is_read(key):
                self.tensors.forget_since(length)
                return self._read(function, args, kwargs, leaves)
            self._flush(f"{name_of(function)} is a call that no earlier run made here")
        record_or_none, result = self._observe(key, args, kwargs, leaves)
        if record_or_none is None:
            self.tensors.forget_since(length)
        return result

    def _unrecorded(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], why: str) -> Any:
        self._flush(why)
        self.make_no_path(why)
        return execute(function, args, kwargs)

    def _at_once(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]) -> Any:
        """Executes a call on tensors that nothing recorded reads or writes: data, most of the time."""
        watches = any(record.draws for record in self.records)
        try:
            with DrawWatch() if watches else nullcontext():  # type: ignore[no-untyped-call]
                result = execute(function, args, kwargs)
        except Draws:  # its numbers come behind those that wait to be drawn, so it is recorded like them
            _drawing_functions.add(function)
            return self._called(function, args, kwargs)
        self.tensors.note_result(result, leaves)
        return result

    def _followed_fast(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """The handle of a call that is the next record of the only path left; None where that is not sure."""
        number = len(self.records)
        if len(self.candidates) != 1 or self._speculation is not None or self.tensors.is_any_exposed:
            return None
        path = self.candidates[0]
        fast = path.fast_records[number] if number < len(path.fast_records) else None
        if fast is None or fast.function != function or len(args) != fast.num_args or tuple(kwargs) != fast.names:
            return None
        if fast.modes != current_modes() or why_not_recordable():
            return None
        if not self.tensors.matches(path, fast, (*args, *kwargs.values()) if kwargs else args):
            return None
        self.records.append(fast.record)
        return self.tensors.note_value(made(fast.output, self), (number, 0))

    def _next_record(self, key: Key) -> Record | None:
        """The record of a known path that this call is; None if no path has it."""
        number = len(self.records)
        found = [path for path in self.candidates if self._is_next(path, number, key)]
        if not found:
            return None
        if self._speculation is not None and self._speculation.path is not found[0]:
            return None
        self.candidates = found
        return found[0].records[number]

    def _is_next(self, path: Path, number: int, key: Key) -> bool:
        if number >= len(path.records) or path.records[number].key != key:
            return False
        return all(self.tensors.fits(path, operand) for operand in key.operands)

    def _makes_state(self, record: Record, leaves: list[Any]) -> bool:
        """Whether this is the step of an optimizer that has to make state, which Python may look at behind it."""
        for leaf in leaves:
            if isinstance(leaf, Optimizer):
                snapshot = self.snapshots[len(self.records)] = OptimizerSnapshot.of(leaf)
                self.tensors.note_state(snapshot.tensors)
                return snapshot.num_entries != record.state_entries
        return False

    def _recorded(self, record: Record, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]) -> Any:
        number = len(self.records)
        self.records.append(record)
        if self._speculation is not None:
            return self._from_speculation(self._speculation, record, args, kwargs)
        self._given.extend(leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and type(leaf) is not Handle)
        results: list[torch.Tensor | None] = []
        for output, meta in enumerate(record.outputs):
            if meta is None:
                results.append(None)
            elif meta.alias is not None:
                results.append(leaves[meta.alias])
            else:
                results.append(self.tensors.note_value(made(meta, self), (number, output)))
        return unflatten(record.output_structure, results)

    def _is_read(self, key: Key) -> bool:
        """Whether a call asks for a value: here in an earlier run, or anywhere if it gives no tensors."""
        here = (len(self.records), key.function)
        known = ((read.position, read.function) for path in self.candidates for read in path.reads)
        return _without_tensors(key) in _reading_calls or here in known

    def _read(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]) -> Any:
        """Python asks for a value: what is recorded runs, as a piece if it can."""
        self.reads.add(Read(len(self.records), function, current_line()))
        self._run_pending(f"{name_of(function)} asks for a value")
        result = execute(function, args, kwargs)
        self.tensors.note_result(result, leaves)
        return result

    def _run_pending(self, why: str) -> None:
        """Runs what is recorded as a compiled piece, or else one by one."""
        span = (self._started, len(self.records))
        if span[0] == span[1]:
            return
        alive = self.tensors.handles()
        if self._holds_graph(alive):
            done = self._speculate(span, alive)
        else:
            results = self._launched(PieceSpec(span, tuple(alive)))
            done = results is not None
            if results is not None:
                self._fulfil(alive, results)
        if not done:
            self._flush(why)
            return
        self._started = span[1]
        self._given.clear()
        self.pieces.append(span)

    def _launched(self, spec: PieceSpec) -> list[torch.Tensor] | None:
        with torch._C._EnableTorchFunction():
            return self._launch(self, spec)

    def _fulfil(self, alive: dict[Value, torch.Tensor], results: list[torch.Tensor]) -> None:
        """Gives the handles the last of the results."""
        while alive:
            (number, output), handle = alive.popitem()
            meta = self.records[number].outputs[output]
            assert meta is not None
            fulfil(handle, with_freed_graph(results.pop(), meta))

    def _holds_graph(self, alive: dict[Value, torch.Tensor]) -> bool:
        """Whether somebody may still ask for gradients of what is recorded, through a tensor that is alive."""
        freed = self.candidates[0].freed[len(self.records)]
        return any(value not in freed and tensor.requires_grad for value, tensor in alive.items())

    def _speculate(self, span: tuple[int, int], alive: dict[Value, torch.Tensor]) -> bool:
        """Runs what is recorded and the backward behind it, whose gradients are held back."""
        path, tensors = self.candidates[0], self.tensors
        length = tensors.length()
        plan = plan_speculation(path, *span, tensors)
        if plan is None:
            return False
        leaves = [tensors.externals[index] for index in plan.leaves]
        later = plan.wanted(path)
        before = Before.of(path.records[slice(*span)], tensors)
        results = None
        has_grads = any(leaf.grad is not None for leaf in leaves)
        if self._agree_on_gradients is None or not has_grads:  # those of several ranks may be reduced already, or not
            results = self._launched(PieceSpec(plan.span, (*later, *alive), plan.skipped, plan.leaves))
        if results is None:
            tensors.forget_since(length)
            return False
        speculation = SpeculativeBackward(plan, path, before, length)
        for leaf in reversed(leaves):
            grad = results.pop()
            if grad is not None:
                speculation.grads.insert(0, (leaf, grad))
        self._fulfil(alive, results)
        speculation.values = dict(zip(later, results, strict=True))
        self._speculation = speculation
        return True

    def _from_speculation(
        self, speculation: SpeculativeBackward, record: Record, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A record behind the read that has run already. The backward puts the gradients in place."""
        number = len(self.records) - 1
        if number == speculation.plan.span[1] - 1:
            if self._agree_on_gradients is not None and not self._agree_on_gradients():
                self.records.pop()
                self._flush("another rank went another way")
                self.make_no_path("another rank did not come to the backward that ran ahead")
                return execute(record.key.function, args, kwargs)
            self._started, self._speculation = number + 1, None
            speculation.put()
            return None
        self._started = number + 1
        if number in speculation.plan.skipped:
            return execute(record.key.function, args, kwargs)
        results: list[torch.Tensor | None] = []
        for output, meta in enumerate(record.outputs):
            if meta is None:
                results.append(None)
            else:
                value = with_freed_graph(speculation.values.pop((number, output)), meta)
                results.append(self.tensors.note_value(value, (number, output)))
        return unflatten(record.output_structure, results)

    def _end_speculation(self) -> None:
        """Python went another way: gradients are dropped, and what somebody may still need has a graph again."""
        speculation, self._speculation = self._speculation, None
        if speculation is None:
            return
        used = [one.key for record in self.records for one in record.operands if one.kind == EXTERNAL]
        self.tensors.forget_since((max([speculation.length[0], *(key + 1 for key in used)]), len(self.tensors.numbers)))
        span = (speculation.plan.span[0], len(self.records))
        freed = speculation.path.freed[speculation.plan.position]
        alive = {value: one for value, one in self.tensors.alive().items() if value[0] >= span[0]}
        if not any(one.requires_grad and value not in freed for value, one in alive.items()):
            return
        states = speculation.before.put_back()
        results: dict[Value, torch.Tensor] = {}
        for number in range(*span):
            self.replay(number, alive, results)
        for generator, state in states:
            generator.set_state(state)

    def _flush(self, why: str) -> None:
        """Runs what is recorded, one by one and in order; the run observes from here on."""
        self.candidates = []
        self._end_speculation()
        handles = self.tensors.handles()
        results: dict[Value, torch.Tensor] = dict(handles)
        for number in range(self._started, len(self.records)):
            self.replay(number, handles, results)
        self._started = len(self.records)
        self._given.clear()

    def _observe(
        self, key: Key, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]
    ) -> tuple[Record | None, Any]:
        """Executes a call and notes what it was: a record, or a read, which gives None and its result."""
        self.executed += 1
        line, tensors = current_line(), self.tensors
        seen = observe(lambda: execute(key.function, args, kwargs), leaves)
        if seen.state is not None:
            tensors.note_state(seen.state.tensors)
        if seen.reads:
            given = [one for one in seen.results if isinstance(one, torch.Tensor)]
            if not given and seen.result is not None and seen.result is not NotImplemented:
                _reading_calls.add(_without_tensors(key))
            self.reads.add(Read(len(self.records), key.function, line))
            if any(one.requires_grad for one in given):
                self.make_no_path(f"{name_of(key.function)} gives what no record can, and gradients go through it")
            tensors.note_result(seen.result, leaves)
            return None, seen.result
        if seen.changes_kind:
            self.make_no_path(f"{name_of(key.function)} changes the kind of its argument")
        if any(map(tensors.is_shared, seen.written)):
            self.make_no_path(f"{name_of(key.function)} writes to the memory of an array")
        record = seen.record(key, leaves, line)
        for output, (one, meta) in enumerate(zip(seen.results, record.outputs, strict=True)):
            if meta is not None and meta.alias is None:
                tensors.note_value(one, (len(self.records), output))
        self.records.append(record)
        self._started = len(self.records)
        return record, seen.result


def _without_tensors(key: Key) -> Any:
    """A call as far as it is no tensors and numbers."""
    return key.function, key.structure, tuple(one if one.kind == CONSTANT else one.kind for one in key.operands)


@contextmanager
def _no_current_run() -> Iterator[None]:
    """While open, calls of torch by this thread are those of torch and ours, and not recorded."""
    around, CURRENT.run = CURRENT.run, None
    try:
        yield
    finally:
        CURRENT.run = around
