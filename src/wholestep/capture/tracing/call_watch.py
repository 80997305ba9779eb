"""Refuses a step that would do something outside of Python's objects: a trace would do it, and no later call.

Writes to files and terminals, clocks, the file system, sockets: all of them are calls of C functions. A profile
function sees each one before it runs. Allowed is what computes on Python's own objects and on arrays, whose changes
other parts of a capture see (`capture/effects/c_functions.py`); whatever else is called, by the step or by a library on
its behalf, ends the trace.

Allowed as well is what Python's import system does: it looks for a module and runs it once in a process, also where no
step is compiled.
"""

from __future__ import annotations

import functools
import logging
import os
import random
import sys
import threading
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import BuiltinImporter, FileFinder
from typing import Any, NoReturn

import torch
from torch import nn

from wholestep.capture.effects.c_functions import Kind, compared, kind_of, module_of
from wholestep.capture.effects.library_state import LibraryState, accesses
from wholestep.capture.effects.taken_locks import TakenLocks
from wholestep.capture.native import build
from wholestep.capture.python.code_owner import Owner, owner_of_file
from wholestep.capture.python.user_frame import current_line
from wholestep.capture.reach import rng_and_iterators
from wholestep.capture.reach.reachable import Reachable
from wholestep.errors import CaptureError
from wholestep.util.gc_pause import gc_paused

_PYTHONS = random.random.__self__  # type: ignore[attr-defined]
"""The generator behind the functions of `random`."""


_SEES_ALL = frozenset({eval, exec, globals})
"""What is built in and gives code names that stand nowhere in it. Libraries call them on text of their own."""


class OutsideEffect(CaptureError):
    """The step does something that happens outside of Python's objects, in this call at least."""


@contextmanager
def calls_watched(reachable: Reachable) -> Iterator[None]:
    """While open, a call of a C function that may do more than compute raises `OutsideEffect`, before it runs.

    So does one of a generator of Python or torch that was there before. A handler of the user's may catch that: it is
    raised again at the end. State to which code of libraries leads is added to `reachable`.
    """
    around: Any = sys.getprofile()
    if isinstance(around, tuple) or isinstance(getattr(around, "__self__", None), _Watch):  # of a capture around this
        yield
        return
    native = build.module()
    if native is None and around is not None and not callable(around):
        raise CaptureError("A profiler of C runs (cProfile), so that nobody sees which functions the step calls.")
    with gc_paused():  # what collects garbage calls functions of anybody, in the midst of the user's
        watch = _Watch(reachable)
        if native is None:
            sys.setprofile(watch.profile)
        else:  # costs a trace next to nothing, and a profiler that runs goes on
            native.watch_calls(code_kind, watch.allowed, watch.entered)
        try:
            yield
        finally:
            sys.setprofile(around) if native is None else native.unwatch_calls()
            watch.state.settle()
            keeps = bool(watch.locks)
            watch.locks.give_back()
    if watch.found:
        raise watch.found[0]
    if keeps:
        raise OutsideEffect(
            "The step takes a lock and keeps it, or waits for one that another thread opens. It would do so once, "
            "while capturing, and never again."
        )


_ASKED, _TOLD = 1, 2


def code_kind(code: types.CodeType) -> int:
    """What is watched of a code: C functions that it calls, and when it is entered (`capture/native/call_watch.h`)."""
    is_library = owner_of_file(code.co_filename) in (Owner.PYTHON, Owner.INSTALLED, Owner.TORCH)
    tells = is_library and bool(accesses(code))
    return (_ASKED if _may_be_of_user(code.co_filename) else 0) | (_TOLD if tells else 0)


class _Watch:
    """What one trace calls."""

    def __init__(self, reachable: Reachable) -> None:
        self._thread = threading.get_ident()
        self._generators = {id(_PYTHONS): "Python's random generator"}
        self._generators |= {key: name for key, (name, _) in reachable.generators.items()}
        self._generators |= {id(one): name for name, one in rng_and_iterators.generators_of_torch()}
        self.found: list[OutsideEffect] = []
        compared()
        self.state = LibraryState(reachable)
        self.locks = TakenLocks()
        self._kinds: dict[int, tuple[types.CodeType, int]] = {}
        """By id of a code, which is kept: to hash one takes as long as to look at it."""

    def entered(self, frame: types.FrameType) -> None:
        """A function of a library is about to run."""
        if self._is_of_step(frame.f_back):
            self.state.enter(frame)

    def allowed(self, frame: types.FrameType, function: Any) -> bool:
        """Whether a function is, wherever it is called. Raises where this call of it is not."""
        owner = getattr(function, "__self__", None)
        if isinstance(owner, rng_and_iterators.LOCKS):
            self.locks.note(function)
            return False
        if function in _SEES_ALL:
            file = frame.f_code.co_filename
            is_of_user = owner_of_file(file) is Owner.USER and not file.startswith("<frozen")
            if is_of_user and threading.get_ident() == self._thread:
                self._refuse(
                    f"The step calls {function.__name__} at {current_line()}, which reaches what no code names. Nobody "
                    f"sees whether that changes between calls. Do it outside of the step."
                )
            return False
        is_generator = isinstance(owner, (random.Random, torch.Generator))
        kind = kind_of(function)
        if not is_generator and kind is Kind.NOTHING:
            return True
        if is_generator and id(owner) not in self._generators:  # made by the step itself
            return False
        if not self._is_of_step(frame):
            return False
        if not is_generator and (frame.f_code.co_filename in _TRANSPARENT or self._is_looked_at(function, kind)):
            return False
        self._refuse(_sentence(function, self._generators.get(id(owner), "")))

    def _is_of_step(self, frame: types.FrameType | None) -> bool:
        return threading.get_ident() == self._thread and _is_on_behalf_of_user(frame)

    def _refuse(self, sentence: str) -> NoReturn:
        self.found.append(OutsideEffect(sentence))
        raise self.found[-1]

    def _is_looked_at(self, function: Any, kind: Kind) -> bool:
        return kind is Kind.AN_OBJECT and self.state.may_be_called_on(function)

    def profile(self, frame: types.FrameType, event: str, function: Any) -> None:
        """The same without the native part."""
        if event == "c_call" and self._kind(frame.f_code) & _ASKED:
            self.allowed(frame, function)
        caller = frame.f_back if event == "call" and self._kind(frame.f_code) & _TOLD else None
        if caller is not None and self._kind(caller.f_code) & _ASKED:
            self.entered(frame)

    def _kind(self, code: types.CodeType) -> int:
        if id(code) not in self._kinds:
            self._kinds[id(code)] = (code, code_kind(code))
        return self._kinds[id(code)][1]


def _sentence(function: Any, generator: str) -> str:
    """Why a call of a C function is none for a graph. `generator`: whose method it is, if it is one's."""
    if isinstance(getattr(function, "__self__", None), torch.Generator):
        return rng_and_iterators.uses(generator, function.__name__)
    if generator:
        return rng_and_iterators.draws(generator)
    name = f"{module_of(function)}.{getattr(function, '__name__', function)}"
    return (
        f"The step calls {name} at {current_line()}, which does more than compute with Python's objects. That would "
        f"happen once, while capturing, and never again. Do it outside of the step."
    )


@functools.cache
def _is_of_interest(filename: str) -> bool:
    return not filename.startswith(_own_dirs())


def _may_be_of_user(filename: str) -> bool:
    return filename in _TRANSPARENT or _is_of_interest(filename)


@functools.cache
def _own_dirs() -> tuple[str, ...]:
    packages = (sys.modules[name] for name in ("wholestep", "torch", "sympy"))  # with which torch computes sizes
    return tuple(os.path.dirname(one.__file__ or "") + os.sep for one in packages)


_STANDARD = (os.path.dirname(os.__file__) + os.sep, "<frozen")
_TRANSPARENT = frozenset({nn.modules.module.__file__, torch.random.__file__, torch.cuda.random.__file__})
"""Where torch calls the forward of a module, which may be anybody's, and the generators that the user asks it for."""
_SHOWS_WARNINGS = getattr(getattr(warnings, "_showwarnmsg", None), "__code__", None)
"""What C calls for a warning that nobody filters."""
_IMPORTS = frozenset(finder.find_spec.__code__.co_filename for finder in (BuiltinImporter, FileFinder))
"""Where Python looks for modules, and runs those that it has found."""


def _is_on_behalf_of_user(frame: types.FrameType | None) -> bool:
    """Whether the user's code called this, by itself or through libraries, and neither torch for a purpose of its own
    nor an import. What torch logs and warns of is its own, also where a handler of the user's writes it: a warning of
    the user's is refused where it is made. So are kernels and modes of the user's by which an operator is described:
    they are no part of the step's Python."""
    is_of_user = logs = False
    while frame is not None:
        if frame.f_code.co_name == "__torch_dispatch__" or frame.f_code is _SHOWS_WARNINGS:
            return False
        file = frame.f_code.co_filename
        if file in _IMPORTS:
            return False
        if file not in _TRANSPARENT:
            if not _is_of_interest(file):
                return is_of_user and not logs and not _is_in_operator(frame)
            logs = file == logging.__file__
            is_of_user = is_of_user or ("site-packages" not in file and not file.startswith(_STANDARD))
        frame = frame.f_back
    return is_of_user


def _is_in_operator(frame: types.FrameType | None) -> bool:
    """Whether this runs for an operator that a mode handles."""
    while frame is not None and frame.f_code.co_name != "__torch_dispatch__":
        frame = frame.f_back
    return frame is not None
