"""Tells code of the user from that of installed libraries, of Python and of wholestep."""

from __future__ import annotations

import functools
import inspect
import sys
import sysconfig
import types
from typing import Any

import torch

NO_STATE = ("torch", "numpy", "builtins", "_thread", "threading", "logging", "wholestep")
"""Libraries whose objects are not looked into."""
_LIBRARY_ROOTS = ("torch.", "numpy.", "wholestep.")


def is_user_code(function: types.FunctionType) -> bool:
    """Whether the function is the user's own: not of torch, not of an installed library."""
    name = (function.__module__ or "") + "."
    return not name.startswith(_LIBRARY_ROOTS) and "site-packages" not in function.__code__.co_filename


def is_user_class(kind: type) -> bool:
    """Whether a class is neither torch's nor an installed library's."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return not kind.__module__.startswith(NO_STATE) and "site-packages" not in file


def is_library_class(kind: type) -> bool:
    """Whether a class is torch's or comes with Python, or is one of the libraries that are not looked into."""
    module = str(kind.__module__)
    root = module.partition(".")[0]
    if root in NO_STATE or root not in sys.stdlib_module_names:
        return root in NO_STATE
    # A class that was made by a call, as ``ABCMeta(...)``, is said to stand where the call was: it is not found there.
    found: Any = sys.modules.get(module)
    for part in kind.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is kind


def is_user_file(path: str) -> bool:
    """Whether a source file belongs neither to Python, nor to an installed library, nor to wholestep."""
    if not path or path.startswith("<"):
        return False
    return "site-packages" not in path and "dist-packages" not in path and not path.startswith(_not_users_dirs())


@functools.cache
def _not_users_dirs() -> tuple[str, ...]:
    python = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    return (*(f"{folder}/" for folder in sorted(python)), _own_dir(), f"{torch.__path__[0]}/")


def _own_dir() -> str:
    return (sys.modules["wholestep"].__file__ or "").rpartition("__init__")[0]


@functools.cache  # asked for every frame of every node that is traced
def library_frame(filename: str) -> bool:
    """Whether a source file belongs to torch, to wholestep or to Python itself, and so cannot be the user's line."""
    return filename.startswith(_library_dirs()) or filename.startswith("<")


@functools.cache
def _library_dirs() -> tuple[str, ...]:
    here = _own_dir()
    python = (inspect.getsourcefile(functools) or "").rpartition("functools")[0]
    site = python + "site-packages"
    return tuple(
        d
        for d in (torch.__path__[0] + "/", here, *(python + m for m in ("contextlib", "functools", "unittest")))
        if d and d != site
    )
