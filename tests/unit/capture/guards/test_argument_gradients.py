"""Arguments that come with gradients, and steps that look at them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import wholestep as ws
from wholestep.errors import CaptureError

W = torch.ones(3)


def gives(x: Tensor) -> Any:
    return x.grad, (x * W).detach()


def adds(x: Tensor) -> Any:
    (x * x * W).sum().backward()
    found = x.grad * 1
    x.grad = None
    return found


def reads_behind_a_value(x: Tensor) -> Any:
    loss = (x * x * W).sum()
    value = loss.item()
    loss.backward()
    return value, x.grad


def argument(call: int, had: bool) -> Tensor:
    x = torch.full((3,), 1.0 + call, requires_grad=True)
    x.grad = torch.full((3,), 0.5 + call) if had else None
    return x


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize("order", ["with", "without", "in turns"])
@pytest.mark.parametrize("step", [gives, adds, reads_behind_a_value], ids=lambda step: step.__name__)
def test_a_gradient_from_before_the_call_is_seen(step: Callable[[Tensor], Any], order: str, may_go_live: bool) -> None:
    compiled = ws.compile(step, backend="eager")
    for call in range(5):
        had = order == "with" or (order == "in turns" and call % 2 == 1)
        assert str(compiled(argument(call, had))) == str(step(argument(call, had)))


def test_one_graph_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"looks at the gradient that an argument, a \[3\], had before the call"):
        ws.compile(gives, backend="eager", fullgraph=True)(argument(0, True))


def test_a_step_that_does_not_look_takes_arguments_with_gradients() -> None:
    step = ws.compile(lambda x: (x * W).detach(), backend="eager", fullgraph=True)
    for call in range(4):
        assert torch.equal(step(argument(call, call % 2 == 1)), torch.full((3,), 1.0 + call))
    assert step.cache_info().traces == 1
