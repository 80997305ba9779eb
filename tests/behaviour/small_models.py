"""Small models and losses that many cases share: a few hundred parameters at most."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.behaviour.harness import Job, Run

FEATURES, HIDDEN, CLASSES, ROWS = 6, 8, 3, 5


def mlp(dropout: float = 0.0) -> nn.Sequential:
    """Two linear layers; with dropout between them when asked."""
    middle = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), *middle, nn.Linear(HIDDEN, CLASSES))


def batch_norm_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def sgd(module: nn.Module, **options: Any) -> torch.optim.SGD:
    """SGD with momentum: unlike Adam it is not blind to the scale of a gradient."""
    return torch.optim.SGD(module.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def class_batches(run: Run, calls: int = 3, rows: int = ROWS) -> list[tuple[Tensor, ...]]:
    return run.batches(calls, (rows, FEATURES), classes=CLASSES)


def usual_job(
    run: Run, module: nn.Module, *, calls: int = 3, rows: int = ROWS, ddp: dict[str, Any] | None = None, **options: Any
) -> Job:
    """The most ordinary step (loss, backward, SGD, zero_grad) on `module`; `options` go to the optimizer."""
    model, opt = run.model(module, **(ddp or {})), sgd(module, **options)

    @run.compile
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return Job(step=step, batches=class_batches(run, calls, rows), objects={"model": module, "opt": opt})
