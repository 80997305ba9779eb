"""A call of an ``autograd.Function`` is one record of a live step where a capture shows that it only computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.live.both import CALLS, Compiled, Step, Training, train_both, train_by_stages


class Reversed(torch.autograd.Function):
    """Gradients come back with another sign and strength."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return -ctx.strength * grad, None


class Squared(torch.autograd.Function):
    """Saves a tensor, and gives another one that has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        sign = x.sign()
        ctx.save_for_backward(x)
        ctx.mark_non_differentiable(sign)
        return x * x, sign

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Noisy(torch.autograd.Function):
    """Draws random numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.noise = torch.rand_like(x)
        return x + ctx.noise

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.noise


class Asking(torch.autograd.Function):
    """Asks for a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.total = x.sum().item()
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.total


CALLED: list[str] = []


class Noting(torch.autograd.Function):
    """Writes to a list of Python, in both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        CALLED.append("forward")
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        CALLED.append("backward")
        return 2 * grad


def made_each_time(x: Tensor) -> Tensor:
    class Local(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 3 * grad

    out: Tensor = Local.apply(x)
    return out


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Any], bool]] = {  # and whether it is a record
    "a number": (lambda x: Reversed.apply(x, 0.5), True),
    "a number of the batch": (lambda x: Reversed.apply(x, 1.0 + x.shape[0]), True),
    "two results": (lambda x: torch.mul(*Squared.apply(x)), True),
    "draws": (Noisy.apply, True),
    "asks": (Asking.apply, False),
    "writes in Python": (Noting.apply, False),
    "made in the step": (made_each_time, False),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_autograd_is_a_record_where_it_only_computes(name: str) -> None:
    function, is_record = FUNCTIONS[name]

    def make(training: Training) -> Step:
        def step(x: Tensor) -> Tensor:
            out = training.model.last(function(training.model.first(x)))
            loss = training.update(out.square().mean())
            training.notes.append(loss.item())
            training.notes += CALLED
            CALLED.clear()
            return loss.detach()

        return step

    compiled = Compiled()
    train_both(make, compiled=compiled)
    assert (compiled.launches >= CALLS - 1) is is_record
    train_by_stages(make)


def test_a_strength_that_grows_is_another_record_each_time() -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor) -> Tensor:
            strength = 0.1 * (1 + len(training.notes))
            out = training.model.last(Reversed.apply(training.model.first(x), strength))
            training.notes.append(training.update(out.mean()).item())
            return out.detach()

        return step

    compiled = Compiled()
    train_both(make, compiled=compiled)
    assert compiled.launches == 0
