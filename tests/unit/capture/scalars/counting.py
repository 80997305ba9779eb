"""Things that count in Python: an optimizer, and an object with a slot."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from tests.harness.training import backward_and_step


class Counting(torch.optim.Optimizer):
    """An optimizer as libraries write them: Python numbers in groups, in the state, and in attributes."""

    def __init__(self, params: Any, lr: float = 0.1, *, late: bool = False) -> None:
        super().__init__(params, {"lr": lr, **({} if late else {"step": 0})})
        self.calls, self.mode = 0, "fresh"

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        self.mode = "used"
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            warm = min(1.0, group["step"] / 3)
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state.update(step=0, first=True, mean=torch.zeros_like(param), rate=group["lr"] * 0.5)
                state["step"] += 1
                state["first"] = False
                state["rate"] *= 1 - group["lr"]
                state["mean"] = state["mean"].lerp(param.grad, 0.1)  # another tensor each time
                bias = 1 - math.pow(0.9, state["step"])
                param.add_(state["mean"], alpha=-warm * math.exp(-state["rate"]) / math.sqrt(bias) / self.calls)


def made(kind: Any = Counting, **options: Any) -> Any:
    """A model and its optimizer."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    return model, kind(model.parameters(), **options)


def train(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
    return backward_and_step(model(x).square().sum(), opt).detach()


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * self.count


CALLS = 0


def count_and_train(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    return train(model, opt, x)
