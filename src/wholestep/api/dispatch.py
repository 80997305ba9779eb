"""Dispatch: which entry a call runs, in Python. The native fast call of the last one is tried before.

[Note: one of many traces]
To compare a call with a trace in full takes time, and with each of many as many times. So the entry of each call is
kept under a key: the sizes of its arguments and a few plain values. The next call with that key tries the native call
of that entry. It decides, the key does not: where it says no, or the key is new, all entries are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from wholestep.api.call_stats import CallStats
from wholestep.api.padding import Padding
from wholestep.api.stages import Entry, Stages
from wholestep.capture.guards.fast_guards import FastCall
from wholestep.capture.python import tree_util
from wholestep.capture.reach.arguments import ArgumentPath, awaited, still_waits
from wholestep.errors import ConfigError
from wholestep.runtime.distributed.world import init
from wholestep.util.frame_room import with_frame_room
from wholestep.util.gc_pause import gc_paused
from wholestep.util.progress import progress_shown

MAX_KEYS = 4096
"""Keys of calls that are kept. Steps with sizes that move have any number of them."""


def call_key(thing: Any) -> Hashable:
    """What tells calls of different traces apart, most of the time, in a tree of arguments."""
    if isinstance(thing, torch.Tensor):
        return thing.shape
    kind = type(thing)
    if kind is tuple or kind is list:
        return (kind, *map(call_key, thing))
    if kind is dict:
        return (*thing, *map(call_key, thing.values()))
    return (kind, thing) if kind is int or kind is bool else (kind,)


@contextmanager
def _set_up(entry: Entry) -> Iterator[Callable[[], None]]:
    """While open, and from then on, what the step of an entry sets before it looks at it is set.

    Gives what puts back what was there, which an error does as well.
    """
    setup = entry.captured.setup
    undo = (setup.repeat() if setup is not None else None) or _nothing
    try:
        yield undo
    except BaseException:
        undo()
        raise


def _nothing() -> None:
    """Nothing was set."""


class Dispatcher:
    """The entries of one step, the last one used first."""

    def __init__(self, stages: Stages, stats: CallStats, padding: Padding | None = None) -> None:
        """`padding`: what calls go through before they come here."""
        self.entries: list[Entry] = []
        self.fast_call: FastCall | None = None
        """The native call of the first entry, where it may be used for the next call."""
        self._stages, self._stats, self._padding = stages, stats, padding
        self._by_key: dict[Hashable, Entry] = {}

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the entry whose guards hold for this call; a new one if there is none."""
        key = call_key((args, kwargs))
        known = self._by_key.get(key)
        fast_call = None if known is None or known.executable.is_measured else known.fast_call
        if known is not None and fast_call is not None:
            with _set_up(known) as undo:
                result = fast_call(args, kwargs)
                if result is not fast_call:
                    self._move_to_front(known)
                    self.fast_call = fast_call
                    return result
                undo()
        result = self._compared(args, kwargs)
        if len(self._by_key) >= MAX_KEYS:
            self._by_key.clear()
        self._by_key[key] = self.entries[0]
        return result

    def _compared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the entry whose guards hold, which is the first one afterwards, by a full comparison."""
        self._stats.dispatched_calls += 1
        self.fast_call = None
        self._stages.settle()
        leaves, spec = tree_util.flatten((args, kwargs))
        if any(map(still_waits, leaves)):
            leaves = list(map(awaited, leaves))
            args, kwargs = tree_util.unflatten(leaves, spec)
        entry, reason = self._find(leaves, spec)
        if entry is not None:
            return self._run_again(entry, leaves)
        for entry in [one for one in self.entries if one.captured.setup is not None]:
            with _set_up(entry) as undo:
                if entry.captured.guards.why_not(leaves, spec) is None:
                    return self._run_again(self._current(entry), leaves)
                undo()
        return self._call_new(args, kwargs, leaves, reason)

    def _run_again(self, entry: Entry, leaves: list[Any]) -> Any:
        result = self._run(entry, leaves)
        self._set_fast_call(entry)
        return result

    def last(self) -> Entry:
        """The entry used last. Raises ConfigError before the first call."""
        if not self.entries:
            name = self._stages.name
            raise ConfigError(f"{name} has not been called yet, so there is nothing to look at. Call it once.")
        return self.entries[0]

    def _find(self, leaves: list[Any], spec: tree_util.TreeSpec) -> tuple[Entry | None, str | None]:
        """The entry whose guards hold, moved to the front; or why the one used last does not, if there is one."""
        reason: str | None = None
        by_path: dict[ArgumentPath, Any] = {}
        for entry in self.entries:
            why_not = entry.captured.guards.why_not(leaves, spec)
            if why_not is None:
                return self._current(entry), None
            reason = reason or why_not
            by_path = by_path or dict(zip(tree_util.paths(spec), leaves, strict=True))
            self._stages.retraces.compared(entry.captured.guards, by_path)
        return None, reason

    def _current(self, entry: Entry) -> Entry:
        """An entry whose guards hold, moved to the front; planned anew where it is outdated."""
        self._stats.dispatched_hits += 1
        self._move_to_front(entry)
        if self._stages.is_outdated(entry):
            self.entries[0] = self._stages.plan(entry.captured, entry.lookup)
        return self.entries[0]

    @with_frame_room
    def _call_new(self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any], reason: str | None) -> Any:
        """Builds an entry and runs it; it is one of the entries once its first call has succeeded."""
        stages, stats = self._stages, self._stats
        with gc_paused():
            with progress_shown(stages.name, init().rank):
                stages.retraces.allow(reason)
                entry = stages.build(args, kwargs, is_first=not self.entries)
            with entry.captured.undone_on_error():
                if self._padding is not None:
                    self._padding.check(entry.captured.program)
                result = self._run(entry, leaves)
            self.entries.insert(0, entry)
            self._set_fast_call(entry)
            if entry.loaded_from is not None:
                stats.loaded += 1
            else:
                stats.traces += 1
                stages.keep(entry)
        return result

    def _move_to_front(self, entry: Entry) -> None:
        if self.entries[0] is not entry:
            self.entries = [entry, *(one for one in self.entries if one is not entry)]

    def _run(self, entry: Entry, leaves: list[Any]) -> Any:
        compression, held = self._stages.compression, entry.compression
        if compression is None or held is None:
            return entry.executable(leaves)
        with compression.call(held):
            return entry.executable(leaves)

    def _set_fast_call(self, entry: Entry) -> None:
        """Has the next call try the native call of this entry, if it has one and no calls are measured."""
        run = entry.executable.run() if entry.compression is None else None
        if run is None:
            return
        if entry.fast_call is None and (fast_call := entry.captured.guards.fast_call(run)) is not None:
            entry.fast_call = fast_call
            self._stats.fast_calls.append(fast_call)
        self.fast_call = entry.fast_call
