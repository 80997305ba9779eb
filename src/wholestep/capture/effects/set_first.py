"""Whether a trace sets attributes before it asks for them, so that what they held before decides nothing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from wholestep.capture.python.attribute_access import class_observed

_LOOK_PAST = (nn.Module.__getattr__.__code__, nn.Module.__setattr__.__code__)
"""Code that asks for the ``__dict__`` of a module to find parameters, buffers and children in it."""


class SetFirst:
    """Of some attributes, those that a trace has set, and those that it had asked for before."""

    def __init__(self, places: Collection[tuple[Any, str]]) -> None:
        """`places`: objects, and the name of an attribute of each."""
        self._places, self._thread = tuple(places), threading.get_ident()
        self._waiting = {(id(thing), name) for thing, name in places}
        """Neither set nor asked for yet."""
        self._set: set[tuple[int, str]] = set()

    @property
    def holds(self) -> bool:
        """Whether a trace has set them all before it asked."""
        return all((id(thing), name) in self._set for thing, name in self._places)

    @contextmanager
    def observed(self) -> Iterator[None]:
        """While open, accesses by this thread are noted. Those to objects of a class of C are not."""
        hooks = {"__getattribute__": self._asked, "__setattr__": self._given, "__delattr__": self._given}
        with ExitStack() as stack:
            for kind in {type(thing) for thing, _ in self._places}:
                stack.enter_context(class_observed(kind, hooks))
            yield

    def _asked(self, thing: Any, name: str) -> None:
        if threading.get_ident() != self._thread:
            return
        if name == "__dict__" and sys._getframe(2).f_code not in _LOOK_PAST:
            self._waiting = {one for one in self._waiting if one[0] != id(thing)}
        self._waiting.discard((id(thing), name))

    def _given(self, thing: Any, name: str, *item: Any) -> None:
        place = (id(thing), name)
        if place in self._waiting and threading.get_ident() == self._thread:
            self._waiting.remove(place)
            self._set.add(place)
