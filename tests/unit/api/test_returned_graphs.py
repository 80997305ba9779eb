"""A step that gives a result through whose graph of autograd a backward can go on is live, and gives the graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from wholestep.errors import CaptureError


def train(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss


def train_and_keep(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    return loss


def encode(model: nn.Module, x: Tensor) -> dict[str, Any]:
    return {"encoded": model(x), "number": 3}


def train_and_encode(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    loss = model(x).square().mean()
    loss.backward()
    return loss, model(x)


def evaluate(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x)


def detach(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).detach()


def measure(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """What is computed of a result whose graph has been freed has no graph that anybody could use."""
    out = model(x)
    out.square().mean().backward()
    return out, out.abs().mean()


KEEPS: tuple[Callable[..., Any], ...] = (train_and_keep, encode, train_and_encode)
KEEPS_NONE: tuple[Callable[..., Any], ...] = (train, evaluate, detach, measure)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Dropout(0.5))


@pytest.mark.parametrize("step", KEEPS)
@pytest.mark.parametrize("may_go_live", [True])
def test_it_is_live_and_gives_the_graph(step: Callable[..., Any], may_go_live: bool) -> None:
    del may_go_live
    model = network()
    plain, run = copy.deepcopy(model), ws.compile(step, backend="eager")

    def trained(step: Callable[..., Any], model: nn.Module, number: int) -> list[Tensor | None]:
        torch.manual_seed(number)
        model.zero_grad()
        result = step(model, torch.randn(3, 4))
        leaves = [one for one in torch.utils._pytree.tree_leaves(result) if isinstance(one, Tensor)]
        assert leaves[-1].requires_grad
        (leaves[-1] * 2).sum().backward()
        return [one.detach() for one in leaves] + [param.grad for param in model.parameters()]

    for number in range(12):  # some as they are recorded, then as eager code
        for mine, theirs in zip(trained(run, model, number), trained(step, plain, number), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert "with its graph of autograd" in str(run.explain())


@pytest.mark.parametrize("step", KEEPS)
def test_as_one_graph_it_is_an_error_that_leaves_nothing(step: Callable[..., Any]) -> None:
    run, model = ws.compile(step, backend="eager", fullgraph=True), network()
    state = torch.get_rng_state()
    with pytest.raises(CaptureError, match=r"with its graph of autograd.*torch\.no_grad\(\)"):
        run(model, torch.randn(3, 4, generator=torch.Generator().manual_seed(0)))
    assert all(param.grad is None for param in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("step", KEEPS_NONE)
def test_other_results_are_detached(step: Callable[..., Any]) -> None:
    run, model = ws.compile(step, backend="eager", fullgraph=True), network()
    for _ in range(3):
        result = run(model, torch.randn(3, 4))
        leaves = torch.utils._pytree.tree_leaves(result)
        assert not any(one.requires_grad for one in leaves)
