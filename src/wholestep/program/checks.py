"""Checks of values: what the user's code raises for values that it does not want, raised when the graph runs.

``if labels.max() >= vocab: raise ValueError(...)`` is traced as the branch that raises nothing, and a call of `CHECK`,
which has no result and stays where it is. It stands in front of every write to what the step was given.
"""

from __future__ import annotations

import builtins
from typing import Any

import torch

from wholestep.program.ops import LIBRARY

LIBRARY.define("check(Scalar truth, bool wanted, str error, str message) -> ()")


def _check(truth: Any, wanted: bool, error: str, message: str) -> None:
    if isinstance(truth, (torch.SymBool, torch.SymInt, torch.SymFloat)):
        return  # while tracing
    if bool(truth) is not wanted:
        raise _exception(error, message)


def _exception(name: str, message: str) -> Exception:
    """The exception that the user's code raises, or a RuntimeError with its name if it is no class of Python's own."""
    kind = getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return RuntimeError(f"{name}: {message}" if message else name)
    try:
        return kind(message) if message else kind()
    except TypeError:  # UnicodeDecodeError and its like take more
        return RuntimeError(f"{name}: {message}")


LIBRARY.impl("check", _check, "CompositeExplicitAutograd")

CHECK = torch.ops.wholestep.check.default
"""Raises the named exception with a message if a truth value, or a number taken for one, is not the wanted one."""
