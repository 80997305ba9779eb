"""Cases about the tensors: precision, complex numbers, tensors without dimensions or elements, memory layout."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.behaviour.harness import Job, Registry, Run
from tests.behaviour.small_models import (
    CLASSES,
    FEATURES,
    HIDDEN,
    ROWS,
    add_step,
    class_batches,
    loss_of,
    mlp,
    step_job,
    usual_job,
)
from tests.harness.training import backward_and_step

registry = Registry()
case, step_case = registry.add, partial(add_step, registry)


@step_case(
    module=lambda: nn.Sequential(
        nn.Linear(FEATURES, HIDDEN), nn.LayerNorm(HIDDEN), nn.GELU(), nn.Linear(HIDDEN, CLASSES)
    )
)
def bf16_autocast(model: Any, opt: Optimizer, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, y)
    return backward_and_step(loss, opt), logits


@step_case()
def autocast_reads_weights_twice(model: Any, opt: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """Each weight is cast once, so that its gradients are added in half precision; with the cache off, in float32."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(model, x, y) + loss_of(model, x * 2 + 1, y)
    loss.backward()
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        more = loss_of(model, x - 1, y) + loss_of(model, x * 3, y)
    backward_and_step(more, opt)
    return loss + more


@case(traces=(2,))
def autocast_of_the_caller(run: Run) -> Job:
    """Autocast around the call, on and off in turn, is part of what the step means."""
    job, calls = usual_job(run, mlp(), calls=4), count(1)

    def caller(*batch: object) -> object:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=next(calls) % 2 == 0):
            return job.step(*batch)

    return replace(job, step=caller)


@case()
def loss_without_the_autocast_of_the_caller(run: Run) -> Job:
    """What a step keeps out of autocast stays out of it in every call, here the backward, too."""

    def step(model: Any, opt: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        hidden = model(x)
        with torch.autocast("cpu", enabled=False):
            loss = nn.functional.cross_entropy(hidden.float() @ hidden.float().t(), y)
            loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    def caller(*batch: object) -> object:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return job.step(*batch)

    module = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, CLASSES))
    job = step_job(run, step, module)
    return replace(job, step=caller)


def cast_job(run: Run, module: nn.Module, dtype: torch.dtype) -> Job:
    return usual_job(run, module.to(dtype), batches=[(x.to(dtype), y) for x, y in class_batches(run)])


@case()
def float64(run: Run) -> Job:
    return cast_job(run, mlp(), torch.float64)


@case()
def bf16_parameters(run: Run) -> Job:
    return cast_job(run, mlp(), torch.bfloat16)


@case()
def mixed_dtypes(run: Run) -> Job:
    """Parameters of three precisions in one model and one optimizer."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(FEATURES, HIDDEN, dtype=torch.float64)
            self.narrow = nn.Linear(HIDDEN, HIDDEN, dtype=torch.bfloat16)
            self.usual = nn.Linear(HIDDEN, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.usual(self.narrow(self.wide(x.double()).bfloat16()).float())

    return usual_job(run, Mixed())


class Complex(nn.Module):
    """Complex weights between real inputs and real outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, CLASSES, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).abs() * self.scale


@case()
def complex_parameters(run: Run) -> Job:
    return usual_job(run, Complex())


@case()
def complex_parameters_adam(run: Run) -> Job:
    return usual_job(run, Complex(), optimizer=lambda module: torch.optim.Adam(module.parameters(), lr=1e-2))


class Scalars(nn.Module):
    """A parameter and a buffer without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("shift", torch.tensor(0.25))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.scale + self.shift


@case()
def zero_dimensional_parameter(run: Run) -> Job:
    return usual_job(run, Scalars())


class Empty(nn.Module):
    """A parameter and a buffer without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.nothing = nn.Parameter(torch.empty(0, CLASSES))
        self.register_buffer("none", torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.body(x), self.nothing])[: len(x)] + self.none.sum()


@case()
def empty_parameter(run: Run) -> Job:
    return usual_job(run, Empty())


@case()
def empty_batch(run: Run) -> Job:
    """No rows: a mean over nothing would be NaN, so the loss is a sum; every gradient is zero."""
    batches = run.batches(3, (0, FEATURES))
    return usual_job(run, mlp(), loss=lambda model, x: model(x).square().sum(), batches=batches, weight_decay=0.1)


@case()
def not_a_number(run: Run) -> Job:
    """NaN in the batch reaches the parameters, and that is no error."""
    job = usual_job(run, mlp())
    job.batches[1][0][0, 0] = float("nan")  # type: ignore[index]
    return job


@case()
def channels_last(run: Run) -> Job:
    module = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, CLASSES)
    ).to(memory_format=torch.channels_last)
    batches = run.batches(3, (ROWS, 3, 6, 6), classes=CLASSES)
    batches = [(x.to(memory_format=torch.channels_last), y) for x, y in batches]
    return usual_job(run, module, batches=batches)
