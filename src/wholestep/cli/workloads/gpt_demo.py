"""The training of `wholestep demo`: its settings, its model and step, its batches of text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from wholestep.cli.workloads.gpt import GPT, GPTConfig, train_step
from wholestep.cli.workloads.interleaved import Batch, Recipe
from wholestep.cli.workloads.text_data import batch
from wholestep.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """Everything that decides the numbers of a demo, except the number of ranks."""

    model: GPTConfig = field(default_factory=partial(GPTConfig, width=128, context=64))
    """Small, so that a step is more than its matrix products: those are the same in both contenders."""
    steps: int = 300
    seed: int = 0
    rows: int = 4
    """Windows of text per rank and step."""
    learning_rate: float = 2e-3
    block_steps: int = 10
    """Steps of one contender before the other takes over."""
    text_bytes: int = 4 * 2**20
    held_out_batches: int = 16
    sample_bytes: int = 300
    temperature: float = 0.8
    quiet: bool = False
    """No progress bar."""

    def __post_init__(self) -> None:
        if self.steps < 2:
            raise ConfigError(f"--steps wants at least 2 (the first one compiles and is not timed), got {self.steps}.")


def demo_recipe(settings: DemoSettings) -> Recipe:
    """The training of the demo, for `open_contender`."""
    return Recipe(
        build=partial(GPT, settings.model),
        step=train_step,
        num_steps=settings.steps,
        learning_rate=settings.learning_rate,
        seed=settings.seed,
    )


def demo_batches(text: Tensor, settings: DemoSettings, *, rank: int, num_batches: int) -> Iterator[Batch]:
    """Batches of one rank, decided by the seed, the rank and the place in the order alone."""
    draw = torch.Generator().manual_seed(1_000_003 * settings.seed + rank)
    for _ in range(num_batches):
        yield batch(text, rows=settings.rows, context=settings.model.context, draw=draw)
