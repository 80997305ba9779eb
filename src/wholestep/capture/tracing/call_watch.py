"""Refuses a step that would do something outside of Python's objects: a trace would do it, and no later call.

Writes to files and terminals, clocks, the file system, sockets: all of them are calls of C functions. A profile
function sees each one before it runs. Allowed is what computes on Python's own objects and on arrays, whose changes
other parts of a capture see; whatever else is called, by the step or by a library on its behalf, ends the trace.

Allowed as well is what Python's import system does: it looks for a module and runs it once in a process, also where no
step is compiled.
"""

from __future__ import annotations

import _thread
import functools
import logging
import os
import random
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import BuiltinImporter, FileFinder
from typing import Any

import torch
from torch import nn

from wholestep.capture.native import build
from wholestep.capture.python.user_frame import current_line
from wholestep.capture.reach import rng_and_iterators
from wholestep.errors import CaptureError
from wholestep.util.gc_pause import gc_paused

_COMPUTING = frozenset(
    {
        "builtins", "math", "cmath", "itertools", "operator", "functools", "collections", "re", "struct", "abc",
        "weakref", "thread", "contextvars", "warnings", "string", "random", "copy", "types", "datetime", "decimal",
        "fractions", "statistics", "heapq", "bisect", "array", "hashlib", "json", "pickle", "typing", "enum", "sre",
        "inspect", "imp", "sys", "gc", "torch", "numpy", "optree", "sympy",
    }
)  # fmt: skip
"""Modules, and modules of classes, whose C functions compute; by the first part of the name, without underscores."""
_OUTSIDE = frozenset({print, input, open, breakpoint, _thread.start_new_thread})
"""Functions of these modules that do more; what another thread does is not watched."""
_PYTHONS = random.random.__self__  # type: ignore[attr-defined]
"""The generator behind the functions of `random`."""
NO_NAMES: Mapping[int, str] = types.MappingProxyType({})


class OutsideEffect(CaptureError):
    """The step does something that happens outside of Python's objects, in this call at least."""


@contextmanager
def calls_watched(generators: Mapping[int, str] = NO_NAMES) -> Iterator[None]:
    """While open, a call of a C function that may do more than compute raises `OutsideEffect`, before it runs.

    So does one of a generator of Python or torch that was there before: `generators` has names by id. A handler of the
    user's may catch that: it is raised again at the end.
    """
    known = {id(_PYTHONS): "Python's random generator", **generators}
    known |= {id(one): name for name, one in rng_and_iterators.generators_of_torch()}
    found: list[OutsideEffect] = []
    around = sys.getprofile()
    thread = threading.get_ident()

    def allowed(frame: types.FrameType, function: Any) -> bool:
        """Whether a function is, wherever it is called. Raises where this call of it is not."""
        owner = getattr(function, "__self__", None)
        is_generator = isinstance(owner, (random.Random, torch.Generator))
        if not is_generator and computes(function):
            return True
        if is_generator and id(owner) not in known:  # made by the step itself
            return False
        if not _may_be_of_user(frame.f_code.co_filename) or threading.get_ident() != thread:
            return False
        if not _is_on_behalf_of_user(frame):
            return False
        found.append(OutsideEffect(_sentence(function, known.get(id(owner), ""))))
        raise found[-1]

    def profile(frame: types.FrameType, event: str, function: Any) -> None:
        if event == "c_call" and _may_be_of_user(frame.f_code.co_filename):
            allowed(frame, function)

    if around is not None:  # somebody profiles this thread, whose function must stay
        yield
        return
    native = build.module()
    with gc_paused():  # what collects garbage calls functions of anybody, in the midst of the user's
        if native is None:
            sys.setprofile(profile)
        else:  # costs a trace next to nothing
            native.watch_calls(allowed)
        try:
            yield
        finally:
            sys.setprofile(around)
    if found:
        raise found[0]


def _sentence(function: Any, generator: str) -> str:
    """Why a call of a C function is none for a graph. `generator`: whose method it is, if it is one's."""
    if isinstance(getattr(function, "__self__", None), torch.Generator):
        return rng_and_iterators.uses(generator, function.__name__)
    if generator:
        return rng_and_iterators.draws(generator)
    name = f"{_module_of(function)}.{getattr(function, '__name__', function)}"
    return (
        f"The step calls {name} at {current_line()}, which does more than compute with Python's objects. That would "
        f"happen once, while capturing, and never again. Do it outside of the step."
    )


def computes(function: Any) -> bool:
    """Whether a C function only computes with Python's objects, tensors and arrays."""
    if function in _OUTSIDE:
        return False
    return _module_of(function).partition(".")[0].strip("_") in _COMPUTING


def _module_of(function: Any) -> str:
    if module := getattr(function, "__module__", None):  # of functions, and of methods that pybind11 makes
        return str(module)
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    kind = owner if isinstance(owner, type) else type(owner)
    bases = (base for base in kind.__mro__ if name in vars(base))
    # A class may have a method of its own in Python that calls this one.
    found = (base.__module__ for base in bases if not isinstance(vars(base)[name], types.FunctionType))
    return str(next(found, kind.__module__))


@functools.cache
def _is_of_interest(filename: str) -> bool:
    return not filename.startswith(_own_dirs())


def _may_be_of_user(filename: str) -> bool:
    return filename in _TRANSPARENT or _is_of_interest(filename)


@functools.cache
def _own_dirs() -> tuple[str, ...]:
    packages = (sys.modules[name] for name in ("wholestep", "torch"))
    return tuple(os.path.dirname(one.__file__ or "") + os.sep for one in packages)


_STANDARD = (os.path.dirname(os.__file__) + os.sep, "<frozen")
_TRANSPARENT = frozenset({nn.modules.module.__file__, torch.random.__file__, torch.cuda.random.__file__})
"""Where torch calls the forward of a module, which may be anybody's, and the generators that the user asks it for."""
_IMPORTS = frozenset(finder.find_spec.__code__.co_filename for finder in (BuiltinImporter, FileFinder))
"""Where Python looks for modules, and runs those that it has found."""


def _is_on_behalf_of_user(frame: types.FrameType | None) -> bool:
    """Whether the user's code called this, by itself or through libraries, and neither torch for a purpose of its own
    nor an import. What torch logs is its own, also where a handler of the user's writes it."""
    is_of_user = logs = False
    while frame is not None:
        file = frame.f_code.co_filename
        if file in _IMPORTS:
            return False
        if file not in _TRANSPARENT:
            if not _is_of_interest(file):
                return is_of_user and not logs
            logs = file == logging.__file__
            is_of_user = is_of_user or ("site-packages" not in file and not file.startswith(_STANDARD))
        frame = frame.f_back
    return is_of_user
