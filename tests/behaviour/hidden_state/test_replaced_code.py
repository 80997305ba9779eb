"""A function is given other code or defaults between calls, as notebooks do that load a changed file again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws


def scaled(x: Tensor, factor: float = 2.0, *, shift: float = 1.0) -> Tensor:
    return x * factor + shift


class Model(nn.Module):
    """Calls a function and a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def bent(self, x: Tensor) -> Tensor:
        return x * self.weight

    def forward(self, x: Tensor) -> Tensor:
        return scaled(self.bent(x))


def new_code() -> None:
    scaled.__code__ = (lambda x, factor=2.0, *, shift=1.0: x * factor - shift).__code__


def new_defaults() -> None:
    scaled.__defaults__ = (3.0,)


def new_keyword_defaults() -> None:
    scaled.__kwdefaults__ = {"shift": 5.0}


def new_code_of_a_method() -> None:
    Model.bent.__code__ = (lambda self, x: x * self.weight * 4).__code__


CHANGES = [new_code, new_defaults, new_keyword_defaults, new_code_of_a_method]


@pytest.fixture(autouse=True)
def _functions_as_they_were() -> object:
    kept = [(one, one.__code__, one.__defaults__, one.__kwdefaults__) for one in (scaled, Model.bent)]
    yield None
    for one, code, defaults, keywords in kept:
        one.__code__, one.__defaults__, one.__kwdefaults__ = code, defaults, keywords


@pytest.mark.parametrize("change", CHANGES, ids=lambda one: one.__name__)
def test_a_step_takes_the_functions_as_they_are(change: Callable[[], None]) -> None:
    model, x = Model(), torch.tensor([1.0, 2.0])
    step = ws.compile(lambda x: model(x).detach().sum(), backend="eager", fullgraph=True)
    assert step(x) == step(x) == model(x).sum()
    change()
    assert step(x) == model(x).sum()
    assert step.cache_info().traces == 2
    assert "scaled" in str(step.cache_info().reasons) or "bent" in str(step.cache_info().reasons)
    assert step(x) == model(x).sum()
    assert step.cache_info().traces == 2


@pytest.mark.parametrize("may_go_live", [True])
def test_a_step_may_change_a_function_by_itself(may_go_live: bool) -> None:
    model, x = Model(), torch.tensor([1.0, 2.0])

    def step(x: Tensor) -> Tensor:
        loss = model(x).sum()
        scaled.__defaults__ = (scaled.__defaults__[0] + 1,)  # type: ignore[index]
        return loss

    found = [float(one(x)) for one in [ws.compile(step, backend="eager")] * 4]
    assert scaled.__defaults__ == (6.0,)
    scaled.__defaults__ = (2.0,)
    assert found == [float(step(x)) for _ in range(4)]


SLOPE = {"of": 1.0}


def test_what_a_custom_operator_reads_moves() -> None:
    """``torch.ops`` gives an operator that does not lead to the Python of its backward."""

    @torch.library.custom_op("hidden_state::passed_on", mutates_args=())
    def passed_on(x: Tensor) -> Tensor:
        return x.clone()

    passed_on.register_fake(torch.empty_like)
    passed_on.register_autograd(lambda ctx, grad: grad * SLOPE["of"])
    weight = nn.Parameter(torch.ones(3))

    @ws.compile(backend="eager", fullgraph=True)
    def step(x: Tensor) -> Tensor:
        torch.ops.hidden_state.passed_on(x * weight).sum().backward()
        grad, weight.grad = weight.grad, None
        assert grad is not None
        return grad

    for slope in (1.0, 1.0, 2.0, 3.0):
        SLOPE["of"] = slope
        assert torch.equal(step(torch.ones(3)), torch.full((3,), slope))
