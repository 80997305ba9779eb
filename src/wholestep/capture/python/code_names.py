"""What code names: globals, attributes, modules; and the parts of Python by which it may come to others."""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import types
from collections.abc import Collection, Iterable, Iterator

from wholestep.capture.python.class_attributes import CONSTRUCTORS, NOT_IN_A_STEP, functions_in
from wholestep.capture.python.code_owner import Owner, owner_of_class

FUNCTION_PARTS = ("__code__", "__defaults__", "__kwdefaults__")
"""What a function has besides its globals and its closure, and may be given anew: a notebook that loads a changed file
again gives functions of it their new code."""
_PAST_CLASSES = ("__setattr__", "__delattr__")
"""``object.__setattr__(thing, "name", item)`` writes to an object, and its class does not tell."""


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code and all that is made inside of it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from codes(const)


def names(code: types.CodeType) -> Iterator[str]:
    """Names of globals and attributes in a code, those included that it asks for by text.

    Of a constructor those that it reads: what it stores are attributes of a new object. (Those of base classes, which
    it calls, are looked at as well.)
    """
    yield from _read_in(code) - CONSTRUCTORS if code.co_name in CONSTRUCTORS else code.co_names
    if not {"getattr", "hasattr", "attrgetter", *_PAST_CLASSES}.isdisjoint(code.co_names):
        yield from _texts(code)


def written_past_classes(reached: Iterable[types.CodeType]) -> set[str]:
    """Names of attributes that codes may write without the class of the object being asked to."""
    return {text for one in reached if not set(_PAST_CLASSES).isdisjoint(one.co_names) for text in _texts(one)}


def _texts(code: types.CodeType) -> Iterator[str]:
    return (text for text in code.co_consts if isinstance(text, str) and text.isidentifier())


def globals_of(function: types.FunctionType) -> set[str]:
    """Globals of a function that its code reads, writes or deletes by name, those included that are not there yet.
    (An attribute that is called as some global is none, nor is what is built in and no global hides.)"""
    held = function.__globals__
    found = {name for code in codes(function.__code__) for name in _globals_in(code)}
    return {name for name in found if name in held or not hasattr(builtins, name)}


@functools.lru_cache(maxsize=4096)
def _globals_in(code: types.CodeType) -> frozenset[str]:
    return frozenset(one.argval for one in dis.get_instructions(code) if one.opname in _GLOBAL)


@functools.lru_cache(maxsize=4096)
def _read_in(code: types.CodeType) -> frozenset[str]:
    found = (one.argval for one in dis.get_instructions(code) if one.opname != "STORE_ATTR")
    return frozenset(one for one in found if isinstance(one, str)) & {*code.co_names}


_GLOBAL = frozenset(
    ["LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL", "DELETE_GLOBAL"]
)  # fmt: skip


def names_in_library(kind: type) -> frozenset[str]:
    """Names in the methods of a class of an installed library, or of a container of Python's own, whose code is not
    looked through otherwise."""
    owners = {Owner.INSTALLED, *([Owner.PYTHON] if issubclass(kind, Collection) else [])}
    bases = [base for base in kind.__mro__ if owner_of_class(base) in owners]
    methods = [one for base in bases for key, item in vars(base).items() if key not in NOT_IN_A_STEP
               for one in map(inspect.unwrap, functions_in(item)) if hasattr(one, "__code__")]  # fmt: skip
    return frozenset(name for one in methods for code in codes(one.__code__) for name in names(code))


def imported(code: types.CodeType) -> Iterator[str]:
    """Names of the modules that code imports while it runs."""
    if any(one.opname == "IMPORT_NAME" for one in dis.get_instructions(code)):
        yield from (one.argval for one in dis.get_instructions(code) if one.opname == "IMPORT_NAME")
