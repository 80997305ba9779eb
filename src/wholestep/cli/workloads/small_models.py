"""Three small trainings for any machine, each a model, its step and its data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wholestep.cli.workloads.gpt import GPT, GPTConfig, train_step
from wholestep.cli.workloads.gpt_demo import DemoSettings, demo_batches
from wholestep.cli.workloads.interleaved import Batch
from wholestep.cli.workloads.text_data import standard_library


class WorkloadName(StrEnum):
    """What is trained."""

    MLP = "mlp"
    """Sixty-four narrow layers: mostly launches and small collectives."""
    GPT = "gpt"
    """The step and the text of the demo, and a model of three times the size: mostly arithmetic."""
    CONV = "conv"
    """Convolutions with batch norm: buffers that are broadcast at every step."""


class MLP(nn.Module):
    """(B, 64) -> (B, 64) through `num_layers` residual layers of width 64."""

    def __init__(self, num_layers: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class ConvNet(nn.Module):
    """(B, 3, 32, 32) -> (B, 64): three stages of residual convolutions with batch norm, each half as wide in space."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64), num_blocks: int = 2) -> None:
        super().__init__()
        stages = []
        for before, width in pairwise((3, *widths)):
            stages += [nn.Conv2d(before, width, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            stages += [ConvBlock(width) for _ in range(num_blocks)]
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(widths[-1], 64)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return self.head(self.stages(x).mean(dim=(2, 3)))  # type: ignore[no-any-return]


class ConvBlock(nn.Module):
    """(B, C, H, W) -> the same: x + norm(conv(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return x + F.relu(self.norm(self.conv(x)))


def regression_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """One ordinary regression step; returns the loss, 0-d."""
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _gpt_batches(*, steps: int, rank: int) -> Iterator[Batch]:
    settings = DemoSettings(model=GPTConfig(), rows=8)
    return demo_batches(standard_library(max_bytes=settings.text_bytes).train, settings, rank=rank, num_batches=steps)


def _drawn(shape: tuple[int, ...], *, steps: int, rank: int) -> Iterator[Batch]:
    """Random inputs of `shape`, and 64 numbers for each."""
    draw = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        yield torch.randn(shape, generator=draw), torch.randn(shape[0], 64, generator=draw)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model, its step and its data."""

    build: Callable[[], nn.Module]
    step: Callable[..., Tensor]
    batches: Callable[..., Iterator[Batch]]
    """`batches(steps=..., rank=...)`, on the CPU."""


WORKLOADS = {
    WorkloadName.MLP: Workload(build=MLP, step=regression_step, batches=partial(_drawn, (32, 64))),
    WorkloadName.GPT: Workload(build=partial(GPT, GPTConfig()), step=train_step, batches=_gpt_batches),
    WorkloadName.CONV: Workload(build=ConvNet, step=regression_step, batches=partial(_drawn, (8, 3, 32, 32))),
}
