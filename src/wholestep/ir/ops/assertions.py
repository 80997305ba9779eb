"""Assertions in a graph: errors that the user's code raises for values, raised as it runs.

``if labels.max() >= vocab: raise ValueError(...)`` is traced as the branch that raises nothing, and a call of `CHECK`,
which has no result and stays where it is. It stands before every write to what the step was given.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from wholestep.ir.ops.library import LIBRARY

LIBRARY.define("check(Scalar truth, bool wanted, str error, str message) -> ()")


def _check(truth: Any, wanted: bool, error: str, message: str) -> None:
    if isinstance(truth, (torch.SymBool, torch.SymInt, torch.SymFloat)):
        return  # while tracing
    if bool(truth) is not wanted:
        raised = _exception(error, message)
        raised.wholestep_check = True  # type: ignore[attr-defined]
        raise raised


def is_of_check(error: Exception) -> bool:
    """Whether a check of a graph has raised this: nothing was written, and its text names values by their code."""
    return getattr(error, "wholestep_check", False)


def _exception(name: str, message: str) -> Exception:
    """The exception that the user's code raises, or a RuntimeError that names it if its class is not to be found."""
    module, _, path = name.partition(":")
    kind: Any = sys.modules.get(module)
    for part in path.split("."):
        kind = getattr(kind, part, None)
    try:
        made = kind(message) if message else kind()
    except Exception:  # a class inside of a function is not found, and some take other arguments
        made = None
    return made if isinstance(made, Exception) else RuntimeError(f"{path}: {message}" if message else path)


LIBRARY.impl("check", _check, "CompositeExplicitAutograd")

CHECK = torch.ops.wholestep.check.default
"""Raises an exception, named by its module and its qualified name with a colon between them, a
message if a truth value, or a number taken for one, is not the wanted one."""
