"""Sizes that move and rates that change count as numbers: what code does with one gives what eager code gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import wholestep as ws
from tests.behaviour.numbers.uses import BOTH, SIZES, Use

ROWS, RATES = (5, 5, 3, 6, 2, 6), (0.5, 0.5, 3.0, 0.25, 2.5, 3.0)
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


def outcomes(use: Use, compiled: Compile, kind: str) -> list[Any]:
    """What some calls give, with the type of the number that comes out as such."""

    def of_a_size(x: Tensor) -> tuple[Tensor, Any]:
        found = use(x.shape[0])
        return x.double() * found, type(found).__name__

    def of_a_rate(x: Tensor, rate: float) -> tuple[Tensor, Any]:
        found = use(rate)
        return x.double() * found, type(found).__name__

    torch.manual_seed(0)
    x = torch.randn(8, 3)
    found: list[Any] = []
    run = compiled(of_a_size if kind == "size" else of_a_rate)
    for rows, rate in zip(ROWS, RATES, strict=True):
        try:
            product, name = run(x[:rows].clone()) if kind == "size" else run(x, rate)
            found.append((product.tolist(), name))
        except Exception as error:
            found.append(type(error).__name__)
    return found


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize(("kind", "name"), [*(("size", n) for n in {**BOTH, **SIZES}), *(("rate", n) for n in BOTH)])
def test_a_number_is_used_as_in_eager_code(kind: str, name: str) -> None:
    use = {**BOTH, **SIZES}[name]
    eager = outcomes(use, lambda step: step, kind)
    assert outcomes(use, lambda step: ws.compile(step, backend="eager"), kind) == eager
