"""Remainders and whole quotients of traced floats, which torch's symbols take for those of whole numbers.

Of any float it believes that ``x % 1.0`` is 0 and that ``x // 1.0`` is x: `float` and comparisons would be answered
with that, while tracing and for ever. So they are computed by tensors, of which nothing is believed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from wholestep.capture.python.tracing_thread import on_this_thread


@contextmanager
def float_remainders() -> Iterator[None]:
    """While open, ``%`` and ``//`` of symbolic floats are nodes like any other, on the thread that opened it."""
    with ExitStack() as stack:
        for name, operator in (("mod", torch.remainder), ("floordiv", torch.floor_divide)):
            for prefix in ("", "r"):
                method = f"__{prefix}{name}__"
                original = getattr(torch.SymFloat, method)
                computed = on_this_thread(_by_tensors(operator, reflected=bool(prefix)), original)
                stack.enter_context(patch.object(torch.SymFloat, method, computed))
        yield


def _by_tensors(operator: Callable[..., torch.Tensor], *, reflected: bool) -> Callable[[Any, Any], Any]:
    def compute(number: Any, other: Any) -> Any:
        symbolic = isinstance(other, (torch.SymInt, torch.SymFloat))
        if not (symbolic or isinstance(other, (int, float))):
            return NotImplemented
        first = torch.scalar_tensor(number, dtype=torch.float64)
        second = torch.scalar_tensor(other, dtype=torch.float64) if symbolic else torch.full_like(first, other)
        return operator(*((second, first) if reflected else (first, second))).item()

    return compute
