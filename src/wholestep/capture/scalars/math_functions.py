"""Functions of Python's ``math`` on numbers that are inputs of the graph.

``1 - math.pow(beta, step)`` of an optimizer, ``math.cos(math.pi * epoch / total)`` of a schedule: C code that wants a
float, where there is a symbol. While a step is traced the module's functions take symbols, too. What torch has no
symbolic form for becomes an operator that runs the very function at every call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from wholestep.errors import CaptureError
from wholestep.ir.ops.library import LIBRARY

_FUNCTIONS = (
    "exp", "expm1", "exp2", "log", "log2", "log10", "log1p", "cbrt", "sin", "cos", "tan", "asin", "acos", "atan",
    "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "gamma", "lgamma", "fabs", "degrees", "radians",
    "fmod", "atan2", "hypot", "copysign",
)  # fmt: skip
"""Those of one or more floats that give a float. (Square roots and powers have forms of torch; ``exp2`` is of 3.11.)"""
_QUESTIONS = ("isfinite", "isinf", "isnan")
"""Of one float. torch has functions of these names."""
_SYMBOLS = (torch.SymFloat, torch.SymInt)

_answers: list[torch.Tensor] = []
"""Those that the running trace was given."""

LIBRARY.define("of_numbers(str function, Tensor[] numbers) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def _of_numbers(function: str, numbers: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor(getattr(math, function)(*(one.item() for one in numbers)), dtype=torch.float64, device="cpu")


LIBRARY.impl("of_numbers", _of_numbers, "CPU")
torch.library.register_fake(
    "wholestep::of_numbers", lambda function, numbers: torch.empty((), dtype=torch.float64), lib=LIBRARY
)


@contextmanager
def symbolic_math() -> Iterator[None]:
    """While open, functions of ``math`` take symbolic numbers. With others they do as ever, in every thread."""
    with ExitStack() as stack:
        for name in _FUNCTIONS:
            stack.enter_context(patch.object(math, name, _taking(name, _recorded(name))))
        for name in _QUESTIONS:
            stack.enter_context(patch.object(math, name, _taking(name, _asked(name))))
        stack.enter_context(patch.object(math, "sqrt", _taking("sqrt", torch.sym_sqrt)))
        stack.enter_context(patch.object(math, "pow", _taking("pow", _power)))
        try:
            yield
        finally:
            _answers.clear()


def refuse_predicates(leaves: Iterable[Any]) -> None:
    """Raises CaptureError where a step leaves such an answer: Python's is a bool, which the graph has not."""
    if any(leaf is answer for leaf in leaves for answer in _answers):
        raise CaptureError(
            "The step returns or keeps what math.isfinite, isinf or isnan says of a number that it computes. Return "
            "the number, and ask outside of the step; to raise for it (`if not math.isfinite(x): raise ...`) is fine."
        )


def _taking(name: str, symbolic: Callable[..., Any]) -> Callable[..., Any]:
    original = getattr(math, name)

    def call(*numbers: Any) -> Any:
        return (symbolic if any(isinstance(one, _SYMBOLS) for one in numbers) else original)(*numbers)

    return call


def _recorded(name: str) -> Callable[..., Any]:
    def call(*numbers: Any) -> Any:
        boxed = [torch.full((), one, dtype=torch.float64, device="cpu") for one in numbers]
        return torch.ops.wholestep.of_numbers(name, boxed).item()

    return call


def _asked(name: str) -> Callable[..., Any]:
    """The answer as a tensor, which may decide whether something is raised (`capture/scalars/assert_branches.py`)."""

    def call(number: Any) -> Any:
        answer = getattr(torch, name)(torch.full((), number, dtype=torch.float64, device="cpu"))
        _answers.append(answer)
        return answer

    return call


def _power(base: Any, exponent: Any) -> Any:
    return torch.sym_float(base) ** torch.sym_float(exponent)
