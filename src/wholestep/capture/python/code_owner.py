"""Tells code of the user from that of installed libraries, of Python and of wholestep: by where its file lies.

A name says nothing of it: ``torch_utils.py`` may be the user's, and ``torch_geometric`` is not torch.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import sysconfig
import types
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

_IMMUTABLE, _ON_HEAP = 1 << 8, 1 << 9
"""Flags of classes. Those of C lie on the heap as well in newer versions of Python, one module after another."""
_PACKAGES = frozenset({"site-packages", "dist-packages"})
"""Folders into which packages are installed, wherever they lie."""


class Owner(Enum):
    """Whose a file is."""

    TORCH = "torch"
    NUMPY = "numpy"
    OURS = "wholestep"
    PYTHON = "Python's own library"
    INSTALLED = "an installed package"
    USER = "the user"


LOOKED_THROUGH = (Owner.TORCH, Owner.NUMPY, Owner.OURS)
"""Whose classes are not looked through. (What is asked of their objects is observed.)"""


@functools.cache  # asked for every function that a step reaches
def owner_of_file(path: str) -> Owner:
    """Whose a source file or a compiled module is. Text that is no path, as of ``exec``, is the user's."""
    for owner, folders in _folders().items():
        if path.startswith(folders) or (owner is Owner.INSTALLED and not _PACKAGES.isdisjoint(PurePath(path).parts)):
            return owner
    return Owner.USER


@functools.cache
def _folders() -> dict[Owner, tuple[str, ...]]:
    """Folders of each owner, those that lie in others first."""
    path = sysconfig.get_path
    found = {
        Owner.TORCH: torch.__path__, Owner.NUMPY: np.__path__, Owner.OURS: [_own_dir()],
        Owner.INSTALLED: [path("purelib"), path("platlib")], Owner.PYTHON: [path("stdlib"), path("platstdlib")],
    }  # fmt: skip
    return {owner: tuple(f"{one.rstrip(os.sep)}{os.sep}" for one in folders) for owner, folders in found.items()}


def owner_of_module(name: str) -> Owner:
    """Whose an imported module is. One without a file is whose the package is in which it lies."""
    root = name.partition(".")[0]
    for module in (sys.modules.get(name), sys.modules.get(root)):
        if file := getattr(module, "__file__", None):
            return owner_of_file(file)
    return Owner.PYTHON if root in sys.stdlib_module_names else Owner.USER


def owner_of_class(kind: type) -> Owner:
    """Whose a class is."""
    return owner_of_module(str(kind.__module__))


def is_user_code(function: types.FunctionType) -> bool:
    """Whether the function is the user's own: not of torch, not of an installed library."""
    return owner_of_function(function) in (Owner.USER, Owner.PYTHON)


def owner_of_function(function: types.FunctionType) -> Owner:
    """Whose a function is. Text that was compiled has no file: it is whose the module is in which it was."""
    file = function.__code__.co_filename
    return owner_of_module(function.__module__ or "") if file.startswith("<") else owner_of_file(file)


def is_user_class(kind: type) -> bool:
    """Whether a class is neither torch's nor an installed library's."""
    return owner_of_class(kind) is Owner.USER


def is_library_class(kind: type) -> bool:
    """Whether a class is torch's or comes with Python, or is one of the libraries that are not looked into."""
    owner = owner_of_class(kind)
    if owner in LOOKED_THROUGH or owner is not Owner.PYTHON:
        return owner in LOOKED_THROUGH
    # A class that was made by a call, as ``ABCMeta(...)``, is said to stand where the call was: it is not found there.
    found: Any = sys.modules.get(str(kind.__module__))
    for part in kind.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is kind or not is_writable(kind)


def is_writable(kind: type) -> bool:
    """Whether a class can be given attributes: a ``class`` statement or a call has made it. Most of C cannot."""
    return bool(kind.__flags__ & _ON_HEAP) and not kind.__flags__ & _IMMUTABLE


def is_user_file(path: str) -> bool:
    """Whether a source file belongs neither to Python, nor to an installed library, nor to wholestep."""
    return bool(path) and not path.startswith("<") and owner_of_file(path) is Owner.USER


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
