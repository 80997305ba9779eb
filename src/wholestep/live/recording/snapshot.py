"""What an optimizer reads of Python, as it was when its step was recorded.

A recorded step of an optimizer runs after lines of the user's that may change rates, groups or state by then
(a scheduler, ``group["lr"] *= 0.5``, ``load_state_dict``). So a record holds what stood there, and the run is given it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from operator import is_
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from wholestep.capture.guards.fast_guards import VERSIONED, StateGuard, state_guard
from wholestep.live.recording.handle import Handle


@dataclass(frozen=True, slots=True)
class OptimizerSnapshot:
    """Groups, defaults and state of an optimizer, by reference: tensors in them are not copied."""

    optimizer: Optimizer
    groups: list[dict[str, Any]]
    contents: list[dict[str, Any]]
    """Of each group; its list of parameters is a copy."""
    defaults: dict[str, Any]
    state: dict[Any, Any]
    entries: dict[Any, dict[Any, Any]]
    """What the dicts in `state` hold, as copies."""
    num_entries: int
    """How many things its state holds. A step that finds fewer than the last one left makes some."""
    params: tuple[torch.Tensor, ...]
    """Its parameters."""
    tensors: tuple[torch.Tensor, ...]
    """Those of its state."""
    watch: OptimizerWatch | None = None
    """What has taken it."""

    @classmethod
    def of(cls, optimizer: Optimizer) -> OptimizerSnapshot:
        """As the optimizer is now."""
        entries = {key: dict(item) for key, item in optimizer.state.items() if type(item) is dict}
        return cls(
            optimizer, list(optimizer.param_groups),
            [{**group, "params": list(group["params"])} for group in optimizer.param_groups],
            dict(optimizer.defaults),
            dict(optimizer.state), entries, len(optimizer.state) + sum(map(len, entries.values())),
            params=tuple(_strided(one for group in optimizer.param_groups for one in group["params"])),
            tensors=tuple(_strided(one for item in (optimizer.state, *entries.values()) for one in item.values())),
        )  # fmt: skip

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While open, the optimizer is as it was; then as it is now, but for what is written meanwhile."""
        now = OptimizerSnapshot.of(self.optimizer) if self.watch is None else self.watch.snapshot()
        if now is self or self.equals(now):
            yield
            return
        self._put()
        try:
            yield
        finally:
            now._put_back(self)

    def equals(self, other: OptimizerSnapshot) -> bool:
        """Whether nothing was exchanged between two snapshots."""
        return self is other or (
            _same(self.groups, other.groups)
            and all(map(_same_group, self.contents, other.contents))
            and _same_items(self.defaults, other.defaults)
            and _same(list(self.state), list(other.state))
            and _same(list(self.state.values()), list(other.state.values()))
            and all(map(_same_entries, self.entries.values(), other.entries.values()))
        )

    def _put(self) -> None:
        opt = self.optimizer
        opt.param_groups[:] = self.groups
        for group, contents in zip(self.groups, self.contents, strict=True):
            params = group["params"]
            group.clear()
            group.update(contents, params=params)
            params[:] = contents["params"]
        opt.defaults.clear()
        opt.defaults.update(self.defaults)
        opt.state.clear()
        opt.state.update(self.state)
        for key, entries in self.entries.items():
            self.state[key].clear()
            self.state[key].update(entries)

    def _put_back(self, ran: OptimizerSnapshot) -> None:
        """As `self` says, where Python has changed something since `ran`; state that the run has made stays."""
        made = {key: item for key, item in self.optimizer.state.items() if key not in ran.state}
        self._put()
        for key, item in made.items():
            self.optimizer.state.setdefault(key, item)


def _strided(things: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Those with memory. (A handle has none, and would be asked for its numbers.)"""
    tensors = (one for one in things if isinstance(one, torch.Tensor) and type(one) is not Handle)
    return (one for one in tensors if one.layout is torch.strided)


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))


def _same_items(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    return _same(list(one), list(other)) and all(map(_same_value, one.values(), other.values()))


def _same_value(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, (int, float, tuple, str)) and one == other)


def _same_group(one: dict[str, Any], other: dict[str, Any]) -> bool:
    if not _same(one["params"], other["params"]) or len(one) != len(other):
        return False
    return all(name == "params" or _same_value(item, other.get(name)) for name, item in one.items())


def _same_entries(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one.values(), other.values()))


class AsRecorded(Protocol):
    """Something of Python's that a recorded call reads."""

    def in_place(self) -> AbstractContextManager[None]:
        """While open, it is as it was when the call was recorded."""


@contextmanager
def as_recorded(read: Sequence[AsRecorded]) -> Iterator[None]:
    """While open, all that calls read of Python is as it was when they were recorded."""
    with ExitStack() as stack:
        for snapshot in read:
            stack.enter_context(snapshot.in_place())
        yield


class OptimizerWatch:
    """An optimizer, and whether anything that a snapshot of it holds was written since the last one."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._last: OptimizerSnapshot
        self._guard: StateGuard | None
        self._take()

    def snapshot(self) -> OptimizerSnapshot:
        """The optimizer as it is now: the last snapshot again where nothing was written."""
        opt, last = self._optimizer, self._last
        changed = self._changed()
        if changed is None or any(number >= len(opt.param_groups) for number in changed):
            self._take()
        elif changed:  # numbers of groups, such as a rate
            contents = list(last.contents)
            for number in changed:
                contents[number] = {**opt.param_groups[number], "params": last.contents[number]["params"]}
            self._last = replace(last, contents=contents)
            assert self._guard is not None
            self._guard.accept()
        return self._last

    def _take(self) -> None:
        opt = self._optimizer
        self._last = last = replace(OptimizerSnapshot.of(opt), watch=self)
        self._held = (opt.param_groups, opt.state, opt.defaults)
        containers: list[tuple[Any, Any]] = [(group, None) for group in opt.param_groups]
        containers += [(group["params"], tuple(group["params"])) for group in opt.param_groups]
        containers += [(opt.param_groups, tuple(last.groups)), (opt.defaults, None), (opt.state, None)]
        containers += [(opt.state[key], None) for key in last.entries]
        plain = all(type(thing) in (*VERSIONED, list) for thing, _ in containers)
        self._guard = state_guard((), (), containers) if plain else None

    def _changed(self) -> list[int] | None:
        """Containers that were written, by number; None where that cannot be told."""
        opt = self._optimizer
        if self._guard is None or not all(map(is_, self._held, (opt.param_groups, opt.state, opt.defaults))):
            return None
        return [number for number in self._guard.changed() if number >= 0]
