"""Trains contenders in alternating blocks of steps, so that a slow machine slows all.

A contender owns its model, optimizer and schedule; all contenders start from the same seed and see the same batches.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import wholestep as ws
from wholestep.errors import InternalError

Batch = tuple[Tensor, Tensor]
Step = Callable[..., Any]


class ContenderKind(Enum):
    """Who runs the step. The value is what a reader sees."""

    WHOLESTEP = "wholestep"
    EAGER_DDP = "eager DDP"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What all contenders do alike."""

    build: Callable[[], nn.Module]
    """Makes the model on the CPU, from torch's global generator."""
    step: Step
    """`step(model, optimizer, x, y)` -> loss, written for one device."""
    num_steps: int
    """Steps in all: the length of the schedule."""
    learning_rate: float
    """The peak, reached after the warm-up."""
    seed: int = 0


@dataclass(slots=True, kw_only=True)
class Contender:
    """One training on this rank, and what was measured of it."""

    kind: ContenderKind
    step: Step
    module: nn.Module
    """The plain module; what is trained, wrapped or not."""
    model: nn.Module
    """What the step is given: the module, or DistributedDataParallel around it."""
    optimizer: torch.optim.Optimizer
    scheduler: LambdaLR
    losses: list[float] = field(default_factory=list)
    """The loss of every step on this rank's batch."""
    times_ms: list[float] = field(default_factory=list)
    """Wall time of every step, until the device is idle; batches and schedule are outside. The first one compiles."""


def open_contender(kind: ContenderKind, recipe: Recipe, world: ws.World) -> Contender:
    """Builds a contender on this rank, with the same weights as all others."""
    torch.manual_seed(recipe.seed)
    module = recipe.build().to(world.device)
    step, model = recipe.step, module
    if kind is ContenderKind.WHOLESTEP:
        step = ws.compile(recipe.step, strategy=ws.DDP(), fullgraph=True)
    else:
        model = DistributedDataParallel(module, device_ids=[world.device] if world.device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    return Contender(
        kind=kind,
        step=step,
        module=module,
        model=model,
        optimizer=optimizer,
        scheduler=LambdaLR(optimizer, lambda done: warmup_cosine(done, num_steps=recipe.num_steps)),
    )


def compiled_step(contender: Contender) -> ws.CompiledStep:
    """The compiled step of a contender.

    Raises InternalError for an eager contender.
    """
    if not isinstance(contender.step, ws.CompiledStep):
        raise InternalError(
            f"The contender {contender.kind.value!r} was asked for a compiled step, but runs a plain function."
        )
    return contender.step


def warmup_cosine(done: int, *, num_steps: int, warmup: float = 0.08, floor: float = 0.1) -> float:
    """Factor on the peak rate after `done` steps: linear warm-up, then a cosine to `floor`.

    `warmup`: share of the steps.
    """
    num_warmup = max(1, round(warmup * num_steps))
    if done < num_warmup:
        return (done + 1) / num_warmup
    progress = min(1.0, (done - num_warmup) / max(1, num_steps - num_warmup))
    return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2


def run_interleaved(
    contenders: Sequence[Contender],
    batches: Iterable[Batch],
    *,
    block_steps: int,
    on_step: Callable[[Contender], None] | None = None,
) -> None:
    """Run every contender over `batches`, `block_steps` at a time. The order of the contenders turns round at every
    block."""
    stream = iter(batches)
    order = list(contenders)
    while block := list(islice(stream, block_steps)):
        for contender in order:
            for x, y in block:
                _run_step(contender, x, y)
                if on_step is not None:
                    on_step(contender)
        order.reverse()


def _run_step(contender: Contender, x: Tensor, y: Tensor) -> None:
    _wait_for_device(x.device)
    start = time.perf_counter()
    loss = contender.step(contender.model, contender.optimizer, x, y)
    _wait_for_device(x.device)
    contender.times_ms.append(1e3 * (time.perf_counter() - start))
    contender.losses.append(float(loss))
    contender.scheduler.step()


def _wait_for_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Step times of one contender over all ranks; a step is as slow as its slowest rank."""

    first_ms: float
    """The first call, which compiles."""
    median_ms: float
    p10_ms: float
    p90_ms: float


def timing(times_ms_by_rank: Sequence[Sequence[float]]) -> Timing:
    """Summarise at least two steps per rank, the first one apart."""
    first, *rest = (max(step) for step in zip(*times_ms_by_rank, strict=True))
    rest.sort()
    return Timing(
        first_ms=first,
        median_ms=statistics.median(rest),
        p10_ms=rest[len(rest) // 10],
        p90_ms=rest[(9 * len(rest)) // 10],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Times of one contender over another's, block by block: above one, the other is faster."""

    median: float
    p10: float
    p90: float


def ratio(reference: Sequence[Sequence[float]], other: Sequence[Sequence[float]], *, block_steps: int) -> Ratio:
    """Compares times by rank of two contenders, at least two steps each.

    They raced in blocks of `block_steps`.

    A block of one contender is compared with that of the other beside it, by their medians: what slows the machine down
    for longer than two blocks slows both. The first step of all, which compiles, is left out.
    """
    blocks = []
    for times_by_rank in (reference, other):
        slowest = [max(step) for step in zip(*times_by_rank, strict=True)]
        starts = range(0, len(slowest), block_steps)
        kept = [slowest[max(1, start) : start + block_steps] for start in starts]
        blocks.append([statistics.median(block) for block in kept if block])
    found = sorted(a / b for a, b in zip(*blocks, strict=True))
    return Ratio(median=statistics.median(found), p10=found[len(found) // 10], p90=found[(9 * len(found)) // 10])


def largest_difference(one: nn.Module, other: nn.Module) -> float:
    """Largest absolute difference between two modules of the same structure, over parameters and buffers."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max((float((a.double() - b.double()).abs().max()) for a, b in pairs if a.numel()), default=0.0)
