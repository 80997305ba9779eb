"""Constants of a trace: their values are known until something is written to their memory, and only computed with."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.harness.training import backward_and_step

Factor = Callable[[Tensor], float]

runs: list[float] = []


@torch.library.custom_op("wholestep_tests::noted", mutates_args=())
def noted(x: Tensor) -> Tensor:
    runs.append(float(x))
    return x * 2


@noted.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def written_by_index(loss: Tensor) -> float:
    total = torch.tensor([0.0])
    total[0] = loss
    return total.item()


def written_through_a_view(loss: Tensor) -> float:
    total = torch.tensor(1.0)
    total.view(1, 1).add_(loss)
    return total.item()


def written_to_another_name(loss: Tensor) -> float:
    total = torch.tensor(1.0)
    other = total.detach()
    other += loss
    return float(total)


def written_in_a_list(loss: Tensor) -> float:
    total = torch.tensor(1.0)
    torch._foreach_add_([total.view(1)], [loss.view(1)])
    return total.item()


def written_with_a_constant(loss: Tensor) -> float:
    total, view = torch.tensor(1.0), None
    view = total.view(1)
    total.add_(2)
    torch._foreach_mul_([view], [torch.tensor([3.0])])
    return total.item()


def given_to_an_operator_of_the_user(loss: Tensor) -> float:
    one = torch.tensor(3.0)
    return noted(one).item() + one.item()


def beside_eager_code(factor: Factor, **options: bool) -> None:
    def step(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        scale = factor(loss.detach())
        backward_and_step(loss * (2.0 if scale > 1.1 else 1.0) * scale, opt)
        return loss.detach()

    model = nn.Linear(3, 1)
    nets = model, copy.deepcopy(model)
    eager, own = ((one, torch.optim.SGD(one.parameters(), 0.01)) for one in nets)
    compiled = ws.compile(step, backend="eager", **options)
    for size in (0.1, 1.0, 2.0):
        x = torch.randn(5, 3) * size
        assert torch.equal(compiled(*own, x), step(*eager, x))
        assert torch.equal(nets[0].weight, nets[1].weight)


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize(
    "factor",
    [written_by_index, written_through_a_view, written_to_another_name, written_in_a_list],
)
def test_what_is_written_to_has_no_known_value(factor: Factor, may_go_live: bool) -> None:
    beside_eager_code(factor)


def test_a_constant_that_is_computed_with_constants_is_known() -> None:
    beside_eager_code(written_with_a_constant, fullgraph=True)


@pytest.mark.parametrize("may_go_live", [True])
def test_an_operator_of_the_user_does_not_run_while_tracing(may_go_live: bool) -> None:
    runs.clear()
    beside_eager_code(given_to_an_operator_of_the_user)
    assert runs == [3.0] * 6


def test_such_an_operator_leaves_the_constant_known() -> None:
    def step(x: Tensor) -> Tensor:
        one = torch.tensor(3.0)
        doubled = noted(one)
        return x * doubled * one.item()

    runs.clear()
    assert ws.compile(step, backend="eager", fullgraph=True)(torch.ones(2)).tolist() == [18.0, 18.0]
    assert runs == [3.0]
