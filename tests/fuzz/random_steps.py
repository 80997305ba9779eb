"""Random training steps: a network of random operators, its gradients, perhaps clipping, and an optimizer.

A step is made from a seed alone, so that processes can make the same one; it is an ordinary function.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 6
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "adam one by one": lambda params: torch.optim.Adam(params, lr=0.01, foreach=False),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
}


class Net(nn.Module):
    """Layers chosen by a random generator, with residuals, shared weights, norms and dropout among them."""

    def __init__(self, rng: random.Random, *, dropout: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.plan: list[tuple[str, int]] = []
        for _ in range(rng.randint(1, 6)):
            kinds = ["linear", "linear", "bare", "norm", "embed", "tanh", "residual", "shared", "scale"]
            kind = rng.choice([*kinds, "dropout"] if dropout else kinds)
            self.plan.append((kind, len(self.layers)))
            match kind:
                case "linear" | "residual":
                    self.layers.append(nn.Linear(WIDTH, WIDTH))
                case "bare":
                    self.layers.append(nn.Linear(WIDTH, WIDTH, bias=False))
                case "norm":
                    self.layers.append(nn.LayerNorm(WIDTH))
                case "embed":
                    self.layers.append(nn.Embedding(5, WIDTH))
                case "scale":
                    self.register_parameter(f"scale{len(self.plan)}", nn.Parameter(torch.ones(())))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for index, (kind, at) in enumerate(self.plan, 1):
            match kind:
                case "linear" | "bare" | "norm":
                    x = self.layers[at](x)
                case "residual":
                    x = x + torch.relu(self.layers[at](x))
                case "embed":
                    x = x + self.layers[at]((x[:, 0] > 0).long() + (x[:, 1] > 0).long())
                case "shared" if any(isinstance(one, nn.Linear) for one in self.layers):
                    x = next(one for one in self.layers if isinstance(one, nn.Linear))(x)
                case "scale":
                    x = x * self.get_parameter(f"scale{index}")
                case "dropout":
                    x = nn.functional.dropout(x, 0.3)
                case _:
                    x = torch.tanh(x)
        out: Tensor = self.head(x)
        return out


@dataclass
class RandomStep:
    """A step with what it works on."""

    model: nn.Module
    opt: torch.optim.Optimizer
    run: Callable[[Tensor, Tensor], Any]
    rows: int
    bucket_bytes: int | None
    """None: as planned."""
    forward: list[Callable[[Tensor], Tensor]]
    """What the step calls: the model, or what a test wraps around it."""
    accumulate: list[Callable[[], AbstractContextManager[Any]]]
    """What stands around all but the last backward: nothing, or ``no_sync`` of eager DDP."""

    def batch(self, seed: int) -> tuple[Tensor, Tensor]:
        """Rows of one rank and call."""
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(self.rows, WIDTH, generator=generator)
        return rows, torch.randint(0, 3, (self.rows,), generator=generator)

    def state(self) -> list[Tensor]:
        """Everything that a step may change, in a fixed order."""
        kept = [one for group in self.opt.state.values() for one in group.values() if isinstance(one, Tensor)]
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return [*self.model.parameters(), *self.model.buffers(), *kept, *grads]


def random_step(seed: int, *, dropout: bool = True) -> RandomStep:
    """The step of a seed."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = Net(rng, dropout=dropout)
    kind = rng.choice(sorted(OPTIMIZERS))
    if kind == "adamw" and rng.random() < 0.5:  # two groups with rates of their own
        params = list(model.parameters())
        opt: torch.optim.Optimizer = torch.optim.AdamW([{"params": params[:1], "lr": 0.1}, {"params": params[1:]}])
    else:
        opt = OPTIMIZERS[kind](list(model.parameters()))
    forward: list[Callable[[Tensor], Tensor]] = [model]
    accumulate: list[Callable[[], AbstractContextManager[Any]]] = [nullcontext]
    clip, keep, twice = rng.random() < 0.4, rng.random() < 0.2, rng.random() < 0.2

    def run(x: Tensor, y: Tensor) -> Tensor:
        if twice:
            with accumulate[0]():
                nn.functional.cross_entropy(forward[0](x * 0.5), y).backward()
        loss = nn.functional.cross_entropy(forward[0](x), y)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        opt.step()
        if not keep:
            opt.zero_grad()
        return loss.detach()

    limit = rng.choice([None, None, 1, 60, 200, 1000])
    rows = rng.choice([1, 4, 16])
    return RandomStep(model, opt, run, rows, limit, forward, accumulate)
