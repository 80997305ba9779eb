"""Globals of installed packages: what the user's code reads there, and plain values that their functions read."""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

from wholestep.capture.python import code_names
from wholestep.capture.python.code_owner import Owner, owner_of_file
from wholestep.capture.python.snapshot import SCALARS

_LOOKED_AT = (dict, list, set, deque, types.FunctionType)


def things_named(library: types.ModuleType, names: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Functions and containers of a package with one of these names: ``library.SETTINGS["scale"] = 2``."""
    if owner_of_file(getattr(library, "__file__", None) or "") is Owner.INSTALLED:
        held = vars(library)
        yield from ((key, held[key]) for key in sorted(names & held.keys()) if isinstance(held[key], _LOOKED_AT))


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
