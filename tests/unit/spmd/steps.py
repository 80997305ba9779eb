"""The step, the model and the override that tests of the older surface share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from wholestep.spmd import Override


def pair() -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(0)
    mod = nn.Linear(3, 3)
    return mod, torch.optim.SGD(mod.parameters(), lr=0.1), torch.randn(2, 3)


def train_step(mod: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = mod(x).sum()
    loss.backward()
    opt.step()
    return loss.detach()


class Keeps(Override):
    """Replaces and rewrites what it is told to: by default nothing. Notes what it is asked about."""

    def __init__(self, replace: Callable[[nn.Module], Any] = lambda module: module) -> None:
        self.replace, self.asked = replace, list[str]()

    def replacement(self, fqn: str, orig_submodule: nn.Module) -> nn.Module:
        self.asked.append(fqn)
        return self.replace(orig_submodule)

    def transform(self, gm: fx.GraphModule, flat_state: list[Tensor]) -> fx.GraphModule:
        return gm
