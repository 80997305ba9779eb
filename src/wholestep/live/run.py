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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from wholestep.capture.python.user_frame import current_line
from wholestep.live.handle import CURRENT, Handle, fulfil, made, with_freed_graph
from wholestep.live.recording.metadata import METADATA
from wholestep.live.recording.modes import current_modes, under, why_not_recordable
from wholestep.live.recording.observer import Draws, DrawWatch, Observer
from wholestep.live.recording.path import BACKWARDS, Path, Value
from wholestep.live.recording.record import (
    EXTERNAL,
    NUMBER,
    VALUE,
    Key,
    Operand,
    OutputMeta,
    Read,
    Record,
    is_constant,
    name_of,
)
from wholestep.live.recording.snapshot import OptimizerSnapshot, as_recorded
from wholestep.live.recording.structure import LEAF, flatten, unflatten
from wholestep.live.tensors import TensorTable

_reading_functions: set[Any] = set()
"""Functions of torch that have given Python something other than tensors."""
_drawing_functions: set[Any] = set()
"""Functions of torch that have drawn random numbers without any tensor of the step."""


class Launcher(Protocol):
    """Runs records as a compiled piece."""

    def __call__(self, run: Run, span: tuple[int, int], wanted: Sequence[Value]) -> list[torch.Tensor] | None:
        """The wanted values; None where these records can be no piece, and nothing has run."""


class Run:
    """One call of a live step."""

    def __init__(self, paths: Iterable[Path], arguments: Iterable[Any], launch: Launcher) -> None:
        """`arguments` are the flat arguments of the step. `launch` compiles and runs pieces."""
        self.candidates = list(paths)
        """Known paths that agree with this run so far, while it follows them."""
        self.records: list[Record] = []
        """Of all calls so far."""
        self.reads: set[Read] = set()
        self.snapshots: dict[int, OptimizerSnapshot] = {}
        """Of the optimizers that recorded calls step, by record."""
        self.tensors = TensorTable(arguments)
        self.reason = ""
        """Why this run makes no path, if it does not."""
        self.refused = ""
        """Why records of this run could be no piece."""
        self.executed = 0
        """How many calls were executed one by one."""
        self.pieces: list[tuple[int, int]] = []
        """Spans of records that ran as pieces."""
        self._launch = launch
        self._lock = threading.RLock()
        """Held while something is recorded or runs: another thread may have been given a handle."""
        self._given: list[torch.Tensor] = []
        """Arguments of calls that have not run, which hold them as eager code would until they do."""
        self._started = 0
        """Records before this one have run."""

    # What the function mode calls.

    def called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a torch function by the step's own Python."""
        with torch._C.DisableTorchFunction():
            if function in METADATA:
                return function(*args, **kwargs)
            with self._lock, _no_current_run():
                return self._called(function, args, kwargs)

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

    def path(self) -> Path:
        """What this run has shown, for later ones."""
        tensors = self.tensors
        return Path(tuple(self.records), tensors.described(), list(tensors.numbers), set(self.reads))

    def _called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves: list[Any] = []
        structure = flatten((args, kwargs), leaves)
        draws = bool(self.records) and function in _drawing_functions
        if not (draws or self.tensors.is_involved(leaves)):
            return self._at_once(function, args, kwargs, leaves)
        why = why_not_recordable() or self._unknown_argument(function, leaves) or self._hooks(function)
        if why:
            return self._unrecorded(function, args, kwargs, why)
        length = self.tensors.length()
        self.tensors.copies_shared = bool(self.candidates)
        key = Key(function, structure, tuple(map(self.tensors.operand, leaves)), current_modes())
        if self.candidates:
            record = self._next_record(key)
            if record is not None and not self._makes_state(record, leaves):
                return self._recorded(record, leaves)
            if record is None and self._is_read(function):
                self.tensors.forget_since(length)
                return self._read(function, args, kwargs, leaves)
            self._flush(f"{name_of(function)} is a call that no earlier run made here")
        record_or_none, result = self._observe(key, args, kwargs, leaves)
        if record_or_none is None:
            self.tensors.forget_since(length)
        return result

    def _unrecorded(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], why: str) -> Any:
        self._flush(why)
        self.reason = self.reason or f"{why} ({current_line()})"
        return _execute(function, args, kwargs)

    def _at_once(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]) -> Any:
        """Executes a call on tensors that nothing recorded reads or writes: data, most of the time."""
        watches = any(record.draws for record in self.records)
        try:
            with DrawWatch() if watches else nullcontext():  # type: ignore[no-untyped-call]
                result = _execute(function, args, kwargs)
        except Draws:  # its numbers come behind those that wait to be drawn, so it is recorded like them
            _drawing_functions.add(function)
            return self._called(function, args, kwargs)
        self.tensors.note_result(result, leaves)
        return result

    def _unknown_argument(self, function: Any, leaves: list[Any]) -> str:
        """Why a call is not determined by its arguments as a record holds them; empty if it is."""
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                if type(leaf) not in (torch.Tensor, Handle, nn.Parameter):
                    return f"{name_of(function)} is given a {type(leaf).__name__}"
                if leaf.layout is not torch.strided:
                    return f"{name_of(function)} is given a sparse tensor"
                value = self.tensors.value_of(leaf)
                if type(leaf) is not Handle and leaf.grad_fn is not None and value is None:
                    return f"{name_of(function)} is given a tensor whose graph began before the step"
                if (value is not None or leaf.requires_grad) and self.tensors.is_exposed(leaf):
                    return f"{name_of(function)} is given a tensor whose memory an array of yours shares"
            elif not isinstance(leaf, float) and not is_constant(leaf):
                return f"{name_of(function)} is given a {type(leaf).__name__}"
        return ""

    def _hooks(self, function: Any) -> str:
        """Hooks are Python that runs in the backward, so it cannot run behind the step."""
        if function in BACKWARDS and any(one._backward_hooks or _grad_hooks(one) for one in self.tensors.externals):
            return "a parameter or an input has hooks on its gradient"
        return ""

    # Following.

    def _next_record(self, key: Key) -> Record | None:
        """The record of a known path that this call is; None if no path has it."""
        number = len(self.records)
        found = [path for path in self.candidates if self._is_next(path, number, key)]
        if not found:
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

    def _recorded(self, record: Record, leaves: list[Any]) -> Any:
        number = len(self.records)
        self.records.append(record)
        self._given.extend(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        results: list[torch.Tensor | None] = []
        for output, meta in enumerate(record.outputs):
            if meta is None:
                results.append(None)
            elif meta.alias is not None:
                results.append(leaves[meta.alias])
            else:
                results.append(self.tensors.note_value(made(meta, self), (number, output)))
        return unflatten(record.output_structure, results)

    def _is_read(self, function: Any) -> bool:
        if function in _reading_functions:
            return True
        position = len(self.records)
        return any(
            read.position == position and read.function == function for path in self.candidates for read in path.reads
        )

    def _read(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]) -> Any:
        """Python asks for a value: what is recorded runs, as a piece if it can."""
        self.reads.add(Read(len(self.records), function, current_line()))
        self._run_pending(f"{name_of(function)} asks for a value")
        result = _execute(function, args, kwargs)
        self.tensors.note_result(result, leaves)
        return result

    # Running what is recorded.

    def _run_pending(self, why: str) -> None:
        """Runs what is recorded as a compiled piece, or else one by one."""
        span = (self._started, len(self.records))
        if span[0] == span[1]:
            return
        alive = self.tensors.handles()
        results = None
        if not self._holds_graph(alive):
            with torch._C._EnableTorchFunction():
                results = self._launch(self, span, list(alive))
        if results is None:
            self._flush(why)
            return
        while alive:
            (number, output), handle = alive.popitem()
            meta = self.records[number].outputs[output]
            assert meta is not None
            fulfil(handle, with_freed_graph(results.pop(), meta))
        self._started = span[1]
        self._given.clear()
        self.pieces.append(span)

    def _holds_graph(self, alive: dict[Value, Handle]) -> bool:
        """Whether somebody may still ask for gradients of what is recorded, through a tensor that is alive."""
        freed = self.candidates[0].freed[len(self.records)]
        return any(value not in freed and handle.requires_grad for value, handle in alive.items())

    def _flush(self, why: str) -> None:
        """Runs what is recorded, one by one and in order; the run observes from here on."""
        self.candidates = []
        handles = self.tensors.handles()
        results: dict[Value, torch.Tensor] = dict(handles)
        for number in range(self._started, len(self.records)):
            self._replay(number, handles, results)
        self._started = len(self.records)
        self._given.clear()

    def _replay(self, number: int, handles: dict[Value, Handle], results: dict[Value, torch.Tensor]) -> None:
        record = self.records[number]
        args, kwargs = unflatten(record.key.structure, [self._leaf(one, results) for one in record.operands])
        snapshots = [self.snapshots[number]] if number in self.snapshots else []
        with under(record.key.modes), as_recorded(snapshots):
            result = _execute(record.key.function, args, kwargs)
        self.executed += 1
        found: list[Any] = []
        flatten(result, found)
        del result, args, kwargs  # whoever holds a result is told from us by the number of references
        for output in range(len(found) - 1, -1, -1):
            meta, value = record.outputs[output], (number, output)
            if meta is None or meta.alias is not None:
                found.pop()
            elif value in handles:
                fulfil(handles[value], found.pop())
            else:
                results[value] = self.tensors.note_value(found.pop(), value)

    def _leaf(self, operand: Operand, results: dict[Value, torch.Tensor]) -> Any:
        if operand.kind == VALUE:
            value = (operand.key, operand.detail)
            return results[value] if value in results else self.tensors.tensor_of(value)
        if operand.kind == EXTERNAL:
            return self.tensors.externals[operand.key]
        return self.tensors.numbers[operand.key] if operand.kind == NUMBER else operand.key

    # Observing.

    def _observe(
        self, key: Key, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]
    ) -> tuple[Record | None, Any]:
        """Executes a call and notes what it was: a record, or a read, which gives None and its result."""
        self.executed += 1
        observer, before = Observer(), _kinds(leaves)
        versions = [
            (leaf, leaf._version) for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_inference()
        ]
        optimizer = next((leaf for leaf in leaves if isinstance(leaf, Optimizer)), None)
        with observer if optimizer is None else nullcontext():
            result = _execute(key.function, args, kwargs)
        state_entries = 0
        if optimizer is not None:
            snapshot = OptimizerSnapshot.of(optimizer)
            state_entries = snapshot.num_entries
            self.tensors.note_state(snapshot.tensors)
        found: list[Any] = []
        structure = flatten(result, found)
        line = current_line()
        if observer.reads or not _is_recordable(structure, found):
            self._observe_read(key.function, found, line)
            self.tensors.note_result(result, leaves)
            return None, result
        if before != _kinds(leaves):
            self.reason = self.reason or f"{name_of(key.function)} changes the kind of its argument ({line})"
        if any(leaf._version != version and self.tensors.is_shared(leaf) for leaf, version in versions):
            self.reason = self.reason or f"{name_of(key.function)} writes to the memory of an array ({line})"
        outputs = tuple(None if one is None else OutputMeta.of(one, leaves) for one in found)
        record = Record(key, outputs, structure, draws=observer.draws, state_entries=state_entries, line=line)
        for output, (one, meta) in enumerate(zip(found, outputs, strict=True)):
            if meta is not None and meta.alias is None:
                self.tensors.note_value(one, (len(self.records), output))
        self.records.append(record)
        self._started = len(self.records)
        return record, result

    def _observe_read(self, function: Any, found: list[Any], line: str) -> None:
        tensors = [one for one in found if isinstance(one, torch.Tensor)]
        if not tensors:
            _reading_functions.add(function)
        self.reads.add(Read(len(self.records), function, line))
        if any(one.requires_grad for one in tensors):
            self.reason = self.reason or (
                f"{name_of(function)} gives a tensor whose size is data, and gradients go through it ({line})"
            )


def _is_recordable(structure: Any, found: list[Any]) -> bool:
    """Whether a result is made of plain tensors."""
    if structure is not LEAF and (structure[0] is dict or not all(map(_has_no_dict, structure[-1]))):
        return False
    return all(one is None or (type(one) is torch.Tensor and one.layout is torch.strided) for one in found)


def _has_no_dict(structure: Any) -> bool:
    return structure is LEAF or (structure[0] is not dict and all(map(_has_no_dict, structure[-1])))


def _kinds(leaves: list[Any]) -> list[Any]:
    """What a call in place may change of its arguments besides their numbers."""
    return [(leaf.requires_grad, leaf.shape, leaf.dtype) for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _grad_hooks(tensor: torch.Tensor) -> Any:
    return tensor.is_leaf and tensor._post_accumulate_grad_hooks


def _execute(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls it as if nothing was recorded: tensors may be of classes of their own."""
    with torch._C._EnableTorchFunction():
        return function(*args, **kwargs)


@contextmanager
def _no_current_run() -> Iterator[None]:
    """While open, calls of torch by this thread are those of torch and ours, and not recorded."""
    around, CURRENT.run = CURRENT.run, None
    try:
        yield
    finally:
        CURRENT.run = around
