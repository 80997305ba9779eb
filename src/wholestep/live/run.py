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
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from wholestep.capture.python.user_frame import current_line
from wholestep.capture.wrappers.fully_shard_hooks import is_fully_sharded
from wholestep.live.followed_calls import NOT_SURE, CallWithoutTensors, FollowedCalls, Learned, without_tensors
from wholestep.live.opaque.modules import FunctionCall, OpaqueModule, OpenModule
from wholestep.live.pieces.observation import hooks_on_gradients, observe, unknown_argument
from wholestep.live.pieces.pending_calls import Launcher
from wholestep.live.pieces.shape_inference import resized
from wholestep.live.recording.difference import difference
from wholestep.live.recording.events import communicates
from wholestep.live.recording.handle import (
    CURRENT,
    Handle,
    execute,
    is_looked_into,
    made,
    recording_paused,
    with_torch_functions,
)
from wholestep.live.recording.metadata import METADATA
from wholestep.live.recording.modes import current_modes, why_not_recordable
from wholestep.live.recording.observer import Draws, DrawWatch
from wholestep.live.recording.path import Path
from wholestep.live.recording.record import VALUE, Key, OutputMeta, Read, Record, name_of
from wholestep.live.recording.structure import flatten, unflatten
from wholestep.live.sizes.indices import plain_index


class Run(FollowedCalls):
    """One call of a live step."""

    def __init__(
        self,
        paths: Iterable[Path],
        arguments: Iterable[Any],
        launch: Launcher,
        learned: Learned,
        agree_on_gradients: Callable[[], bool] | None = None,
    ) -> None:
        """Takes what `FollowedCalls` does."""
        super().__init__(paths, arguments, launch, learned, agree_on_gradients)
        self._size_unknown = ""
        """Why sizes of what a call gives were not known, the last time that one was asked for them."""
        self._lock = threading.RLock()
        """Held while something is recorded or runs: another thread may have been given a handle."""
        self._serves_another = False
        """Whether another thread runs what is recorded, and calls modules for that."""
        self._makers: dict[int, Any] = {}
        """By id of tensors that calls on data have made, which are kept, their functions."""

    def called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a torch function by the step's own Python."""
        with torch._C.DisableTorchFunction():
            if function in METADATA:
                return function(*args, **kwargs)
            with self._lock:
                CURRENT.run = None
                try:
                    result = self._followed(function, args, kwargs)
                    return self._called(function, args, kwargs) if result is NOT_SURE else result
                finally:
                    CURRENT.run = self

    def called_module(
        self, plain: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call of a module by the step's own Python: one record, or its Python runs."""
        opaque = None
        is_open = module in self.made_modules or self.is_stopped or is_looked_into()
        if not is_open and self._learned.modules.may_be_opaque(module):
            with self._lock, recording_paused(), torch._C.DisableTorchFunction():
                result = self._followed_module(module, args, kwargs)
                if result is not NOT_SURE:
                    return result
                opaque = self._opaque(module, args, kwargs)
        if isinstance(module, torch.jit.ScriptModule):  # C++ reads its parameters
            with self._lock, recording_paused(), torch._C.DisableTorchFunction():
                self._run_pending(f"{name_of(type(module))} runs in C++")
        if opaque is None and is_fully_sharded(module):
            why = f"{name_of(type(module))} gathers its parameters for its own time, and its Python runs at every call"
            return self.unrecorded(OpenModule(module), args, kwargs, why)
        return plain(module, *args, **kwargs) if opaque is None else self.called(opaque, args, kwargs)

    def unrecorded(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], why: str) -> Any:
        """A call that does more than its arguments say: it is executed at once, and the run makes no path."""
        with self._lock:
            with recording_paused(), torch._C.DisableTorchFunction():
                self.leave_path(function, why)
            return execute(function, args, kwargs)

    def flush(self, why: str) -> None:
        """Runs what is recorded, one by one; the run observes from here on."""
        with self._lock, recording_paused(), torch._C.DisableTorchFunction():
            self._flush(why)

    def before_another_thread_calls(self, module: nn.Module) -> None:
        """Another thread is about to call a module: what is recorded runs if it has to do with its parameters."""
        params = list(module.parameters())
        if params and self._started < len(self.records):
            with self._lock, recording_paused(), torch._C.DisableTorchFunction():
                if not self._serves_another and self.tensors.is_known(params):
                    self._serves_another = True
                    try:
                        self._flush(f"another thread calls a {name_of(type(module))}")
                    finally:
                        self._serves_another = False

    def before_draws_are_told(self, function: Any) -> None:
        """Python is about to ask where generators stand, or to set them: calls that draw before that run."""
        with self._lock, recording_paused(), torch._C.DisableTorchFunction():
            if any(record.drawn for record in self.records[self._started :]):
                self.reads.add(Read(len(self.records), function, current_line()))
                self._run_pending(f"{name_of(function)} asks for the state of random numbers")

    def before_ranks_communicate(self, function: Any) -> None:
        """A function of torch.distributed is about to be called that no call of torch would tell of."""
        with self._lock, recording_paused(), torch._C.DisableTorchFunction():
            self._run_for_peers(function)

    def finish(self) -> None:
        """The step has returned: what is still recorded runs."""
        with self._lock, recording_paused(), torch._C.DisableTorchFunction():
            self._run_pending("the step ends")
            self._give_graphs()

    def _made(self, meta: OutputMeta) -> torch.Tensor:
        return made(meta, self)

    def _opaque(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpaqueModule | None:
        """What a call of a module is a record of; None if the module is open."""
        leaves: list[Any] = []
        flatten((args, kwargs), leaves)
        is_open = any(isinstance(leaf, float) for leaf in leaves) and not isinstance(module, FunctionCall)
        if is_open or unknown_argument(module, leaves, self.tensors):
            return None
        if why_not_recordable():
            return None
        if self.candidates:
            number = len(self.records)
            following = [path.records[number].key.function for path in self.candidates if number < len(path.records)]
            for one in following:
                if isinstance(one, OpaqueModule) and one.module is module and one.holds(args, kwargs):
                    return one
            self._flush(f"{name_of(type(module))} is called where no earlier run called it, or it is another by now")
        found: OpaqueModule | None = with_torch_functions(self._learned.modules.find, (module, args, kwargs), {})
        return found

    def _called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.is_stopped:
            return execute(function, args, kwargs)
        leaves: list[Any] = []
        structure = flatten((args, kwargs), leaves)
        if self._has_other_name(leaves):
            return self._on_known_memory(function, args, kwargs, leaves)
        draws = bool(self.records) and function in self._learned.drawing_functions and self._shares_stream(leaves)
        makes = function in self._learned.making_functions and not unknown_argument(function, leaves, self.tensors)
        if not (draws or makes or isinstance(function, OpaqueModule) or self.tensors.is_involved(leaves)):
            return self._at_once(function, args, kwargs, leaves)
        plain = plain_index(function, args, self._mask_values, self.tensors.note_fresh)
        if plain is not args:
            args, leaves = plain, []
            structure = flatten((args, kwargs), leaves)
        why = (
            why_not_recordable()
            or unknown_argument(function, leaves, self.tensors)
            or hooks_on_gradients(function, self.tensors)
        )
        if why:
            self.leave_path(function, why)
            return execute(function, args, kwargs)
        length = self.tensors.length()
        self.tensors.copies_shared = bool(self.candidates)
        is_module = isinstance(function, OpaqueModule)
        operand = self.tensors.module_operand if is_module else self.tensors.operand
        key = Key(function, structure, tuple(map(operand, leaves)), current_modes())
        if is_module:
            self.tensors.add_module(function)
        if self.candidates:
            record = self._next_record(key)
            if record is not None and (self._is_changed(function, leaves) or not self._draws.go_on(record.drawn)):
                self._run_pending(f"{name_of(function)} is called in another state than before")
            if record is not None and self._is_cut_here():
                self._run_pending("another rank asks for a value here")
            if record is not None and self.leaves_views_out(record):
                self._flush("a view is held that comes into a graph, too")
            if self.candidates and record is not None and not self._makes_state(record, leaves):
                return self._recorded(record, args, kwargs, leaves)
            if record is None and self._is_read(key):
                self.tensors.forget_since(length)
                read = Read(len(self.records), function, current_line())
                return self._read(read, without_tensors(key), args, kwargs, leaves)
            if self.candidates:
                path, tensors = self.candidates[0], self.tensors
                known = [(one, tensors.flags.kind_at_first(one)) for one in tensors.externals]
                self._flush(self._size_unknown or difference(key, len(self.records), path, known, tensors.numbers))
            self.tensors.forget_since(length)  # those of a backward that ran ahead have gone: all others count anew
            return self._called(function, args, kwargs)
        record_or_none, result = self._observe(key, args, kwargs, leaves)
        if record_or_none is None:
            self.tensors.forget_since(length)
        return result

    def _mask_values(self, mask: torch.Tensor) -> torch.Tensor:
        """A mask that is an index, whose values decide a shape."""
        if self.tensors.value_of(mask) is not None:
            self.reads.add(Read(len(self.records), torch.Tensor.nonzero, current_line()))
        if type(mask) is Handle:
            self._run_pending("a mask is an index")
        return mask

    def _at_once(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]) -> Any:
        """Executes a call on tensors that nothing recorded reads or writes: data, most of the time."""
        if communicates(function):
            self._run_for_peers(function)
        watches = self._shares_stream(leaves) and any(record.drawn for record in self.records)
        try:
            with DrawWatch() if watches else nullcontext():  # type: ignore[no-untyped-call]
                result = execute(function, args, kwargs)
        except Draws:  # its numbers come after those that wait to be drawn, so it is recorded like them
            self._learned.drawing_functions.add(function)
            return self._called(function, args, kwargs)
        self.tensors.note_result(result, leaves)
        if isinstance(result, torch.Tensor) and not any(result is leaf for leaf in leaves):
            self._makers[id(result)] = function
        asking = (one for one in (*leaves, result) if isinstance(one, torch.Tensor) and one.requires_grad)
        self._learned.making_functions.update(self._makers[id(one)] for one in asking if id(one) in self._makers)
        return result

    def _has_other_name(self, leaves: list[Any]) -> bool:
        """Whether a call is given memory that calls which have not run know by another name."""
        if self._started == len(self.records) and not self.waits_for_backward:
            return False
        moment = len(self.records), self._started
        return any(self.tensors.is_other_name(leaf, moment) for leaf in leaves)

    def _on_known_memory(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]) -> Any:
        """A call on the memory of gradients or shards that recorded calls know by other names: it runs after them."""
        why = f"{name_of(function)} is given a tensor on the memory of a gradient or a shard"
        if _may_have_graph(leaves):
            self.leave_path(function, why)
            return execute(function, args, kwargs)
        self.reads.add(Read(len(self.records), function, current_line()))
        self._run_pending(why)
        if self.waits_for_backward:
            self._flush(why)
        result = execute(function, args, kwargs)
        self.tensors.note_result(result, leaves)
        return result

    def _shares_stream(self, leaves: list[Any]) -> bool:
        """Whether what a call draws may come of a generator that calls which have not run draw of."""
        generators = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
        if not generators:
            return True
        pending = [operand.key for record in self.records[self._started :] for operand in record.operands]
        return any(one is key for one in generators for key in pending)

    def _next_record(self, key: Key) -> Record | None:
        """The record of a known path that this call is; None if no path has it."""
        number, self._size_unknown = len(self.records), ""
        found = [path for path in self.candidates if self._is_next(path, number, key)]
        if not found:
            return None
        if self._speculation is not None and self._speculation.path is not found[0]:
            return None
        record = found[0].records[number] if self._speculation is not None else self._resized(found[0], number)
        if record is not None:
            self.candidates = found
        return record

    def _resized(self, path: Path, number: int) -> Record | None:
        """A record of a path for the sizes of this call; None where they are not known before it has run."""
        record = resized(path, number, self.records, self.tensors)
        self._size_unknown = record if isinstance(record, str) else ""
        return None if isinstance(record, str) else record

    def _is_next(self, path: Path, number: int, key: Key) -> bool:
        if number >= len(path.records) or path.records[number].key != key:
            return False
        return all(self.tensors.fits(path, operand) for operand in key.operands)

    def _makes_state(self, record: Record, leaves: list[Any]) -> bool:
        """Whether this is the step of an optimizer that has to make state, which Python may look at after it."""
        for leaf in leaves:
            if isinstance(leaf, Optimizer):
                snapshot = self.snapshots[len(self.records)] = self._watch(leaf).snapshot()
                self.tensors.note_state(snapshot)
                return snapshot.num_entries != record.state_entries
        return False

    def _recorded(self, record: Record, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]) -> Any:
        number = len(self.records)
        if record.freezes:
            self.tensors.flags.set(number, leaves[0], lambda: execute(record.key.function, args, kwargs))
        self.take(record)
        if self._speculation is not None:
            return self._from_speculation(self._speculation, record, args, kwargs, leaves)
        self._draws.take(record.drawn)
        self._given.extend(leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and type(leaf) is not Handle)
        results: list[torch.Tensor | None] = []
        for output, meta in enumerate(record.outputs):
            if meta is None:
                results.append(None)
            elif meta.alias is not None:
                results.append(leaves[meta.alias])
            elif (was := record.before(output)) is not None:
                joined = self.tensors.if_alive(was)  # of what an argument is a view of nobody may hold
                results.append(None if joined is None else self._joined(joined, meta, (number, output)))
            else:
                results.append(self._handle_of((number, output), meta))
        self._run_what_others_see(record)
        return unflatten(record.output_structure, results)

    def _is_read(self, key: Key) -> bool:
        """Whether a call asks for a value: here in an earlier run, or anywhere if it gives no tensors."""
        here = (len(self.records), key.function)
        known = ((read.position, read.function) for path in self.candidates for read in path.reads)
        return without_tensors(key) in self._learned.reading_calls or here in known

    def _read_here(self, read: Read, handle: Handle) -> Any:
        leaves: list[Any] = []
        structure = flatten(((handle,), {}), leaves)
        return self._read(read, (read.function, structure, (VALUE,)), (handle,), {}, leaves)

    def _read(
        self, read: Read, call: CallWithoutTensors, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]
    ) -> Any:
        """Python asks for a value: what is recorded runs, as a piece if it can."""
        function = read.function
        self.reads.add(read)
        self._run_pending(f"{read.name} asks for a value")
        if self.waits_for_backward and call not in self._learned.reading_calls and _may_have_graph(leaves):
            self._flush(f"{read.name} may give tensors through which gradients go")
        result = execute(function, args, kwargs)
        self.tensors.note_result(result, leaves)
        return result

    def _observe(
        self, key: Key, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]
    ) -> tuple[Record | None, Any]:
        """Executes a call and notes what it was: a record, or a read, which gives None and its result."""
        self.executed += 1
        line, tensors = current_line(), self.tensors
        seen = observe(key.function, args, kwargs, leaves, (tensors, self.records))
        module = key.function.module if isinstance(key.function, OpaqueModule) else None
        if seen.state is not None:
            tensors.note_state(seen.state)
        if seen.reads:
            if module is not None:
                self._learned.modules.reopen(module, "it returns something else than tensors, or asks for values")
            given = [one for one in seen.results if isinstance(one, torch.Tensor)]
            if not given and seen.result is not None and seen.result is not NotImplemented:
                self._learned.reading_calls.add(without_tensors(key))
            self.reads.add(Read(len(self.records), key.function, line))
            if any(one.requires_grad for one in given):
                self.make_no_path(f"{name_of(key.function)} gives what no record can, and gradients go through it")
            tensors.note_result(seen.result, leaves)
            return None, seen.result
        joined = [*seen.joined, *seen.brought]
        self._learned.making_functions.update(self._makers[id(one)] for one in joined if id(one) in self._makers)
        if seen.changes_kind or not all(map(tensors.value_of, joined)):
            self.make_no_path(f"{name_of(key.function)} changes the kind of its argument")
        if any(map(tensors.is_shared, seen.written)):
            self.make_no_path(f"{name_of(key.function)} writes to the memory of an array")
        for param, before in seen.frozen:
            tensors.flags.note(len(self.records), param, before)
        record = seen.record(key, leaves, line, 0 if module is None else tensors.length()[0])
        for output, (one, meta) in enumerate(zip(seen.results, record.outputs, strict=True)):
            if meta is not None and meta.alias is None:
                tensors.note_value(one, (len(self.records), output))
        self.records.append(record)
        self._started = len(self.records)
        return record, seen.result


def _may_have_graph(leaves: list[Any]) -> bool:
    """Whether what a call with these arguments gives may have a graph."""
    return torch.is_grad_enabled() and any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
