"""What code of the user's stands in the place of functions and methods of libraries: libraries call it, and no walk
comes to it. ``torch.nn.functional.gelu = quick_gelu``.

Libraries have some hundred thousand names, so their dicts are looked through once, and again where a native guard says
that something was written.
"""

from __future__ import annotations

import gc
import operator
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from typing import Any

from wholestep.capture.guards.fast_guards import StateGuard, state_guard
from wholestep.capture.python.class_attributes import functions_in
from wholestep.capture.python.code_owner import Owner, owner_of_file
from wholestep.capture.reach.library_globals import is_users

_METHODS = frozenset({types.FunctionType, staticmethod, classmethod, property})
_MAX_SCANS = 16

Place = tuple[str, Any]
"""A module or a class of a library, with its path."""


class _Scan:
    """Modules and classes, and what was found in each when it was last looked through."""

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = places
        self._guard: StateGuard | None = state_guard((), (), [(_dict_of(thing), None) for _, thing in places])
        self.found = [_users_in(place) for place in places]

    def looked_through(self) -> Iterator[Place]:
        """Looks again at what may have been written; gives those places."""
        numbers = range(len(self.places)) if self._guard is None else self._guard.changed()
        for number in numbers:
            if number >= 0:  # else a mode of torch
                self.found[number] = _users_in(self.places[number])
                yield self.places[number]
        if self._guard is not None:
            self._guard.accept()


class _Libraries:
    """All modules of libraries that have been imported, and their classes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._modules: tuple[Place, ...] = ()
        self._scans: list[_Scan] = []
        self._known: set[int] = set()
        """Ids of modules and classes in `_scans`, which keep them alive."""

    def users(self) -> list[Place]:
        """Everything of the user's with its path, modules in the order of their names."""
        with self._lock:
            modules = tuple(sys.modules.copy().items())
            num_known = len(self._modules)
            if len(self._scans) > _MAX_SCANS or not _same(modules[:num_known], self._modules):
                self._scans, self._known, num_known = [], set(), 0
            self._add([place for scan in self._scans for place in scan.looked_through()])
            self._add([(name, module) for name, module in modules[num_known:] if _is_library(module)])
            self._modules = modules
            return sorted(
                (one for scan in self._scans for found in scan.found for one in found), key=lambda one: one[0]
            )

    def _add(self, modules: Sequence[Place]) -> None:
        new = []
        for name, thing in modules:
            for place in ((name, thing), *(_classes_of(name, thing) if isinstance(thing, types.ModuleType) else ())):
                if id(place[1]) not in self._known:
                    self._known.add(id(place[1]))
                    new.append(place)
        if new:
            self._scans.append(_Scan(new))


def _same(these: tuple[Place, ...], those: tuple[Place, ...]) -> bool:
    """Whether modules are the same objects. They are not compared: some are objects with an equality of their own."""
    return len(these) == len(those) and all(map(operator.is_, (one for _, one in these), (one for _, one in those)))


def _is_library(module: Any) -> bool:
    file = module.__dict__.get("__file__") if isinstance(module, types.ModuleType) else None
    return isinstance(file, str) and owner_of_file(file) in (Owner.TORCH, Owner.INSTALLED, Owner.NUMPY)


def _classes_of(name: str, module: types.ModuleType) -> Iterator[Place]:
    for key, item in vars(module).copy().items():
        if issubclass(type(item), type) and item.__module__ == name and not is_users(item):
            yield f"{name}.{key}", item


def _users_in(place: Place) -> list[Place]:
    path, thing = place
    is_class = not isinstance(thing, types.ModuleType)
    return [(f"{path}.{key}", item) for key, item in _dict_of(thing).copy().items() if _is_users_in(item, is_class)]


def _is_users_in(item: Any, is_class: bool) -> bool:
    return (type(item) in _METHODS and any(map(is_users, functions_in(item)))) if is_class else is_users(item)


def _dict_of(thing: Any) -> dict[str, Any]:
    """What a module or a class has as attributes; of a class behind the view that Python gives of it."""
    found: Any = vars(thing)
    return found if isinstance(found, dict) else gc.get_referents(found)[0]


_libraries = _Libraries()


def put_in_libraries() -> list[Place]:
    """What code of the user's has put in the place of functions and methods of libraries, with its path."""
    return _libraries.users()
