"""Parameters that a step makes and returns."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.conformance.patterns.pattern import (
    CALLS,
    Pattern,
    check,
    row,
    same,
)
from tests.harness.rank_pools import Pool


class NewParameter(Pattern):
    requires_grad, more = True, 0

    def arguments(self, call: int) -> tuple[Any, ...]:
        return (torch.randn(16),)

    def step(self, x: Tensor) -> Any:
        p = nn.Parameter(x + self.more if self.more else x, requires_grad=self.requires_grad)
        if not self.requires_grad:
            return p, x + 1
        r = p.sin()
        r.sum().backward()
        return p, r.detach()


class FrozenParameter(NewParameter):
    requires_grad = False


class ParameterOfSum(NewParameter):
    more = 123


class FrozenParameterOfSum(ParameterOfSum):
    requires_grad = False


@dataclasses.dataclass
class Out:
    weight: Tensor
    loss: Tensor


class ParameterInAnObject(NewParameter):
    def step(self, x: Tensor) -> Any:
        p, r = super().step(x)
        return {"out": Out(p, r), "p": [p]}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(NewParameter, marks=row("nn_param_return1")),
        pytest.param(FrozenParameter, marks=row("nn_param_return2")),
        pytest.param(ParameterOfSum, marks=row("nn_param_return3")),
        pytest.param(FrozenParameterOfSum, marks=row("nn_param_return4")),
    ],
)
def test_a_returned_new_parameter_is_that_of_eager_code(kind: type[NewParameter]) -> None:
    check(kind)
    eager, pattern = kind(), kind()
    step = ws.compile(pattern.step, fullgraph=True)
    for call in range(CALLS):
        x = pattern.arguments(call)[0]
        (p, r), (q, s) = eager.step(x), step(x)
        assert type(p) is type(q) is nn.Parameter
        assert isinstance(q, nn.Parameter)
        assert (q.is_leaf, q.requires_grad) == (p.is_leaf, p.requires_grad) == (True, kind.requires_grad)
        assert same([p.detach(), p.grad, r], [q.detach(), q.grad, s])
        assert (q.data_ptr() == x.data_ptr()) == (p.data_ptr() == x.data_ptr())
    assert step.cache_info().traces == 1


@row("nn_param_return1")
def test_a_new_parameter_inside_of_what_is_returned() -> None:
    check(ParameterInAnObject)
    result = ws.compile(ParameterInAnObject().step, fullgraph=True)(torch.ones(2))
    assert isinstance(result["out"], Out)
    assert isinstance(result["out"].weight, nn.Parameter)
    assert isinstance(result["p"][0], nn.Parameter)


def parameters_on_a_rank() -> None:
    world = ws.init()
    x = torch.randn(16, device=world.device) + world.rank
    p, r = ws.compile(ParameterOfSum().step, fullgraph=True)(x)
    q, s = ParameterOfSum().step(x)
    assert isinstance(p, nn.Parameter)
    assert same([p.detach(), p.grad, r], [q.detach(), q.grad, s])  # of this rank, and not reduced


@row("nn_param_return3")
def test_a_new_parameter_on_two_ranks_is_not_reduced(ranks2: Pool) -> None:
    ranks2.run(parameters_on_a_rank)
