"""Globals of installed packages: what the user's code reads there, plain values that their functions read, and whether
something in them is the user's; custom operators of the user's, which `torch.ops` gives."""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch._library import custom_ops

from wholestep.capture.python import code_names
from wholestep.capture.python.code_owner import (
    Owner,
    is_user_class,
    is_writable,
    owner_of_file,
    owner_of_function,
)
from wholestep.capture.python.snapshot import SCALARS

_LOOKED_AT = (dict, list, set, deque, types.FunctionType)


def things_named(library: types.ModuleType, names: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Functions and containers of a package with one of these names: ``library.SETTINGS["scale"] = 2``; and, of any
    module, what is the user's: ``functional.gelu = quick_gelu``."""
    held = vars(library)
    is_installed = owner_of_file(held.get("__file__") or "") is Owner.INSTALLED
    for key in sorted(names & held.keys()):
        if (is_installed and isinstance(held[key], _LOOKED_AT)) or is_users(held[key]):
            yield key, held[key]
    if library in (torch, torch.ops):
        yield from _operators_named(names)


def _operators_named(names: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Custom operators of the user's: what ``torch.ops.mine.scale`` gives does not lead to their Python."""
    for name, operator in sorted(custom_ops.OPDEFS.items()):
        if name.rpartition("::")[2] in names and is_users(operator._init_fn):
            yield f"ops.{name}", operator


def belong_to_library(container: Any) -> bool:
    """Whether a container is the globals of a module that is not the user's."""
    if not isinstance(container, dict) or "__spec__" not in container:
        return False
    is_builtin = container.get("__name__") in sys.builtin_module_names
    owner = owner_of_file(container.get("__file__") or "")
    return is_builtin or owner in (Owner.PYTHON, Owner.INSTALLED, Owner.TORCH)


def numbers_read(function: types.FunctionType) -> tuple[str, ...]:
    """Names of globals, compared by value, that the code of a package's function reads."""
    if owner_of_file(function.__code__.co_filename) is not Owner.INSTALLED:
        return ()
    read = {name for code in code_names.codes(function.__code__) for name in code_names.names(code)}
    held = function.__globals__
    return tuple(
        sorted(one for one in read & held.keys() if isinstance(held[one], SCALARS) and not one.startswith("__"))
    )


def is_users(item: Any) -> bool:
    """Whether something to call, or a class, is of the user's code."""
    kind: Any = type(item)  # `isinstance` asks an object for its class, of which some of torch's warn
    if kind is types.FunctionType:
        return (
            owner_of_function(item) is Owner.USER and item.__module__ in sys.modules
        )  # or it was made: a named tuple's
    if issubclass(kind, type):
        return is_writable(item) and is_user_class(item)
    if issubclass(kind, functools.partial):
        return is_users(item.func)
    if issubclass(kind, types.MethodType):
        return is_users(item.__func__) or is_users(item.__self__)
    return _is_callable_of_user(kind)


@functools.lru_cache(maxsize=4096)
def _is_callable_of_user(kind: type) -> bool:
    is_python = isinstance(vars(kind).get("__module__"), str) and is_writable(kind)
    return is_python and is_user_class(kind) and any("__call__" in vars(base) for base in kind.__mro__)
