"""What the suites train: a model, a step and a batch each, the same in every contender."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from wholestep.cli.workloads import small_models
from wholestep.cli.workloads.reference_lm import REFERENCE, LanguageModelSize, build

Step = Callable[[nn.Module, torch.optim.Optimizer, Tensor, Tensor], Tensor]
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One reference training."""

    name: str
    build: Callable[[torch.device], nn.Module]
    """Makes the model on a device, from torch's global generator."""
    step: Step
    """``step(model, optimizer, x, y)`` -> 0-d loss, written for one device."""
    sharded_step: Step
    """The same where FSDP2's own policy chooses the types, and not autocast."""
    draw: Callable[[int], Batch]
    """The batch of a rank, on the CPU. All steps see the same one."""
    dtype: torch.dtype
    """What most of it is computed in."""
    tokens: int
    """Tokens that a rank sees in a step, or rows where there are none."""
    size: LanguageModelSize | None = None

    @property
    def loss_tolerance(self) -> float:
        """How far the loss may be from eager DDP's, relative to it.

        bfloat16: its unit roundoff, 2^-8. Logits are rounded so, and a mean over tokens is no further off.
        float32: its unit roundoff, 2^-24, times 2^10, the terms of the longest sums, which are added in another order.
        """
        return 2.0**-8 if self.dtype is torch.bfloat16 else 2.0**-14


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor) -> Tensor:
    """One step of a model that gives its loss."""
    loss: Tensor = model(tokens, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def autocast_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor) -> Tensor:
    """The same with the forward in bfloat16 autocast."""
    with torch.autocast(tokens.device.type, torch.bfloat16):
        loss: Tensor = model(tokens, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def draw_tokens(size: LanguageModelSize, rank: int) -> Batch:
    """Random tokens and targets of a rank, (rows, length) int64 each."""
    generator = torch.Generator().manual_seed(rank)
    tokens, targets = (
        torch.randint(size.vocabulary, (size.rows, size.length), generator=generator) for _ in range(2)
    )  # fmt: skip
    return tokens, targets


def _language_model(name: str) -> Training:
    size = REFERENCE[name]
    return Training(
        name=name, build=partial(build, size), step=autocast_step, sharded_step=plain_step,
        draw=partial(draw_tokens, size), dtype=torch.bfloat16, tokens=size.rows * size.length, size=size,
    )  # fmt: skip


def _small_batch(workload: small_models.Workload, rank: int) -> Batch:
    return next(iter(workload.batches(steps=1, rank=rank)))


def _build_small(workload: small_models.Workload, device: torch.device) -> nn.Module:
    return workload.build().to(device)


def _small(name: small_models.WorkloadName) -> Training:
    workload = small_models.WORKLOADS[name]
    x, _ = _small_batch(workload, 0)
    return Training(
        name=name.value, build=partial(_build_small, workload), step=workload.step, sharded_step=workload.step,
        draw=partial(_small_batch, workload), dtype=torch.float32,
        tokens=x.numel() if x.dtype == torch.int64 else len(x),
    )  # fmt: skip


SUITES: Mapping[str, tuple[str, ...]] = {"gpu": ("W1", "W2", "W3"), "cpu": ("mlp", "gpt", "conv", "tiny")}
"""The trainings of each suite, in order."""
ON_REQUEST = ("W4",)
"""Trainings of the suites that run only where they are named: most contenders cannot hold them."""


def training(name: str) -> Training:
    """The training called `name`, one of those in `SUITES`."""
    return _language_model(name) if name in REFERENCE else _small(small_models.WorkloadName(name))
