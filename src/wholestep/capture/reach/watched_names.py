"""What a walk looks at of a plain object, and what it cannot look at: refused where the step comes to it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from wholestep.capture.python import code_names
from wholestep.capture.python.attribute_access import HiddenThing, is_observable
from wholestep.capture.python.class_attributes import CALLED_BY_TORCH
from wholestep.capture.python.code_owner import Owner, owner_of_class
from wholestep.capture.python.container_views import own_dict

SCHEDULERS = (LRScheduler, ReduceLROnPlateau)
_MOVED_BY_A_SCHEDULE = frozenset({"last_epoch", "_step_count", "_last_lr"})
LIBRARIES = (Owner.INSTALLED, Owner.TORCH, Owner.NUMPY)
"""Whose code nobody has looked through."""


class WatchedNames:
    """Under which names each object is watched."""

    def __init__(self, observed: Collection[str | type], read: Mapping[int, Collection[str]]) -> None:
        """`observed`, `read`: as `Walker` of `capture/reach/reachability.py` takes them."""
        self.names = {*CALLED_BY_TORCH, *(one for one in observed if isinstance(one, str))}
        """Names in all code of the user's that the walk has met."""
        self._whole = {one for one in observed if isinstance(one, type)}
        self._read = read
        self._library_names: dict[type, frozenset[str]] = {}
        self._left_out: dict[int, frozenset[str]] = {}

    def leave_out(self, thing: Any, names: frozenset[str]) -> None:
        """From now on no attribute of an object under these names matters."""
        self._left_out[id(thing)] = names

    def of(self, thing: Any) -> Collection[str] | None:
        """Names of attributes of a plain object that matter; None for all."""
        if isinstance(thing, SCHEDULERS) and id(thing) not in self._read:
            return self._of_schedule()
        names, left_out = self.known(thing), self._left_out.get(id(thing))
        if left_out is None:
            return names
        return ({*(own_dict(thing) or ()), *self.names} if names is None else {*names}) - left_out

    def known(self, thing: Any) -> Collection[str] | None:
        """The same with those to which a trace may come without harm."""
        kind, read = type(thing), self._read.get(id(thing))
        if read is not None and "__dict__" not in read:
            return read
        if kind in self._whole or owner_of_class(kind) in LIBRARIES or isinstance(thing, SCHEDULERS):
            return None
        if kind not in self._library_names:
            self._library_names[kind] = code_names.names_in_library(kind)
        return self._library_names[kind] | self.names

    def _of_schedule(self) -> Collection[str] | None:
        """Before a trace. The training loop moves a schedule between calls: a step that was saved does not depend on
        where it stands, unless it asks."""
        if {"get_lr", "state_dict"} & self.names:
            return None
        asks = {"get_last_lr", *_MOVED_BY_A_SCHEDULE} & self.names
        return {*self.names, *(_MOVED_BY_A_SCHEDULE if asks else ())}


class HiddenThings:
    """What has a state that nobody can look at, and behind which attribute of which object it lies."""

    def __init__(self, found: list[HiddenThing]) -> None:
        self._found = found
        self._around: list[int] = []
        """Ids of the things in which the walk is, from outside in."""
        self._attribute: tuple[int, str] | None = None
        self._inside: dict[int, HiddenThing] = {}
        """By id of a thing, something hidden that lies in it."""

    def add(self, name: str, thing: Any, why: str) -> None:
        """Notes a thing at which the walk is."""
        hidden = HiddenThing(name, thing, why, self._attribute)
        self._found.append(hidden)
        self._inside |= dict.fromkeys((*self._around, id(thing)), hidden)

    def again(self, thing: Any) -> None:
        """The walk comes another way to a thing."""
        hidden = self._inside.get(id(thing))
        if hidden is not None and hidden.attribute != self._attribute:
            self.add(hidden.name, hidden.thing, hidden.why)

    @contextmanager
    def within(self, thing: Any) -> Iterator[None]:
        """While open, the walk is inside of a thing."""
        self._around.append(id(thing))
        try:
            yield
        finally:
            self._around.pop()

    @contextmanager
    def under(self, thing: Any, name: str) -> Iterator[None]:
        """While open, the walk is at an attribute of an object, which tells a trace when it is asked for it."""
        self._attribute = (id(thing), name) if is_observable(type(thing)) else None
        try:
            yield
        finally:
            self._attribute = None
