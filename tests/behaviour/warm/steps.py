"""Training steps that start warm, and what tests ask of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
import wholestep.api.compiled_step

SCALE = 1.0


def train(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(model(x), y) * SCALE
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    return loss.detach()


def things(width: int = 8, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Tensor, Tensor]:
    """A model, its optimizer and a batch, the same values at every call."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 3))
    opt = torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, **options})
    return model, opt, torch.randn(6, 4), torch.randint(0, 3, (6,))


def few_things() -> tuple[nn.Module, torch.optim.Optimizer, Tensor, Tensor]:
    """Likewise, with few kernels to compile."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return model, torch.optim.SGD(model.parameters(), lr=1e-1), torch.randn(6, 4), torch.randint(0, 3, (6,))


def losses(step: Callable[..., Tensor], context: Any, num_steps: int = 3) -> list[float]:
    """Of some steps with a rate that moves."""
    model, opt, x, y = context
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: 1 / (n + 1))
    found = []
    for _ in range(num_steps):
        found.append(step(model, opt, x, y).item())
        schedule.step()
    return found


def state_of(context: Any) -> list[Tensor]:
    model, opt = context[:2]
    held = [value for state in opt.state.values() for value in state.values()]
    return [*model.state_dict().values(), *held]


def run(fn: Callable[..., Tensor] = train, context: Any = None, **options: Any) -> ws.CompiledStep:
    """A new compiled step that has made one call."""
    step = ws.compile(fn, **options)
    step(*(context or things()))
    return step


def why_captured(first_call: Callable[[], ws.CompiledStep], caplog: pytest.LogCaptureFixture) -> str:
    """Why a step was captured although one was saved."""
    with caplog.at_level(logging.INFO, "wholestep"):
        step = first_call()
    assert step.cache_info().loaded == 0
    assert step.cache_info().traces == 1
    told = [record.getMessage() for record in caplog.records if " is captured: " in record.getMessage()]
    return told[-1]


class Scaled(torch.optim.SGD):
    """Scales its gradients by an attribute of its own."""

    def __init__(self, params: Any, scale: int = 0) -> None:
        super().__init__(params, lr=0.1)
        self.scale = scale

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad, alpha=group["lr"] * self.scale)


def scaled(scale: int) -> Any:
    model, _, x, y = things()
    return model, Scaled(model.parameters(), scale), x, y
