"""A pure step gives no graph of autograd: where a backward could go on through a result, the log says so, once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws


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


def evaluate(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x)


def detach(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).detach()


@pytest.mark.parametrize(("step", "warns"), [
    (train, False), (train_and_keep, True), (encode, True), (evaluate, False), (detach, False),
])  # fmt: skip
def test_a_result_without_its_graph_is_told_of(
    step: Callable[..., Any], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    run, model = ws.compile(step, backend="eager", fullgraph=True), nn.Sequential(nn.Linear(4, 2), nn.Tanh())
    with caplog.at_level(logging.WARNING, "wholestep"):
        for _ in range(3):
            model.zero_grad()
            run(model, torch.randn(3, 4))
    told = [one.getMessage() for one in caplog.records if "without its graph of autograd" in one.getMessage()]
    assert len(told) == warns, told
    assert not told or (step.__name__ in told[0] and "Call backward() in the step" in told[0])
