"""Code as text that another process can compare: of functions, and of what the user has put into libraries."""

from __future__ import annotations

import functools
import hashlib
import inspect
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from wholestep.capture.python.class_attributes import functions_in
from wholestep.capture.python.code_names import globals_of
from wholestep.capture.python.container_views import is_dunder
from wholestep.capture.python.snapshot import SCALARS
from wholestep.capture.reach.library_globals import is_users

_MAX_TEXT = 200  # characters of a text that are kept as they are


def named_in_library(thing: Any) -> str | None:
    """A function or class that is a library's own, by its name: its version is compared. None for anything else."""
    if is_users(thing):
        return None
    if isinstance(thing, types.FunctionType):
        return f"{thing.__module__}.{thing.__qualname__} {digest_of_code(thing.__code__)}"
    if isinstance(thing, (type, types.BuiltinFunctionType, torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', thing)}"
    return None


def read_by_functions(things: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Things with their paths, and plain values and functions of the user's that their code reads as globals, or has
    from their classes."""
    found, seen = deque(things), set[int]()
    while found:
        where, thing = found.popleft()
        yield where, thing
        found.extend(_of_classes(where, thing, seen))
        function = _function_of(thing)
        if function is None or id(function) in seen:
            continue
        seen.add(id(function))
        held = function.__globals__
        read = ((f"{where}: {key}", held[key]) for key in sorted(globals_of(function)) if key in held)
        found.extend((path, one) for path, one in read if isinstance(one, SCALARS) or is_users(one))


def _of_classes(where: str, thing: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Methods and plain values in the class of a callable object or method of the user's, or in such a class, and its
    bases. Each class is looked through once, and is in `seen` then."""
    owner = getattr(thing, "__self__", None) if isinstance(thing, types.MethodType) else thing
    kind = owner if isinstance(owner, type) else type(owner)
    for base in (one for one in kind.__mro__ if is_users(one) and id(one) not in seen):
        seen.add(id(base))
        for key, item in vars(base).copy().items():
            yield from ((f"{where}: {base.__name__}.{key}", one) for one in functions_in(item))
            if isinstance(item, SCALARS) and not is_dunder(key):
                yield f"{where}: {base.__name__}.{key}", item


def _function_of(thing: Any) -> types.FunctionType | None:
    if isinstance(thing, functools.partial):
        return _function_of(thing.func)
    if isinstance(thing, types.MethodType):
        return _function_of(thing.__func__)
    inner = inspect.unwrap(thing) if callable(thing) else thing
    return next((one for one in (thing, inner) if isinstance(one, types.FunctionType) and is_users(one)), None)


def shortened(text: str) -> str:
    """A text; one that is too long to read ends in a digest."""
    if len(text) <= _MAX_TEXT:
        return text
    return f"{text[: _MAX_TEXT // 2]}... {hashlib.sha256(text.encode(errors='backslashreplace')).hexdigest()}"


@functools.cache
def digest_of_code(code: types.CodeType) -> str:
    """A digest of what a code object does, not of its place: the same for the same source in every process."""
    made = hashlib.sha256()
    facts = (code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags,
             code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_exceptiontable)  # fmt: skip
    made.update(repr(facts).encode())
    for const in code.co_consts:
        made.update((digest_of_code(const) if isinstance(const, types.CodeType) else _constant(const)).encode())
    return made.hexdigest()[:20]


def _constant(const: Any) -> str:
    if isinstance(const, frozenset):
        return f"frozenset {sorted(map(_constant, const))}"
    if isinstance(const, tuple):
        return f"({', '.join(map(_constant, const))})"
    return f"{type(const).__name__} {const!r}"
