"""Arithmetic of traced floats of which torch's symbols believe too much.

Of any float torch believes that ``x % 1.0`` is 0 and that ``x // 1.0`` is x: `float` and comparisons would be answered
with that, while tracing and for ever. So they are computed by tensors, of which nothing is believed.

Of ``x ** y`` it asks for a promise that x is not negative. To look for a proof takes a tenth of the time of a trace
with AdamW, which has three powers for each parameter, and nobody needs it: the graph computes the power as Python does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from wholestep.capture.python.tracing_thread import on_this_thread

_POWER: Any = torch.SymFloat.__pow__


@contextmanager
def float_arithmetic() -> Iterator[None]:
    """While open, ``%``, ``//``, ``**`` of symbolic floats are nodes like any other, on the thread that opened it."""
    with ExitStack() as stack:
        for name, operator in (("mod", torch.remainder), ("floordiv", torch.floor_divide)):
            for prefix in ("", "r"):
                method = f"__{prefix}{name}__"
                original = getattr(torch.SymFloat, method)
                computed = on_this_thread(_by_tensors(operator, reflected=bool(prefix)), original)
                stack.enter_context(patch.object(torch.SymFloat, method, computed))
        power = on_this_thread(_power, torch.SymFloat.__pow__)
        stack.enter_context(patch.object(torch.SymFloat, "__pow__", power))
        yield


def _power(number: Any, other: Any) -> Any:
    if number.node.hint is not None or not isinstance(other, (int, float, torch.SymInt, torch.SymFloat)):
        return _POWER(number, other)  # the number of this call is known, and need not be promised
    return number.__float_pow__(torch.sym_float(other))


def _by_tensors(operator: Callable[..., torch.Tensor], *, reflected: bool) -> Callable[[Any, Any], Any]:
    def compute(number: Any, other: Any) -> Any:
        symbolic = isinstance(other, (torch.SymInt, torch.SymFloat))
        if not (symbolic or isinstance(other, (int, float))):
            return NotImplemented
        first = torch.scalar_tensor(number, dtype=torch.float64)
        second = torch.scalar_tensor(other, dtype=torch.float64) if symbolic else torch.full_like(first, other)
        return operator(*((second, first) if reflected else (first, second))).item()

    return compute
