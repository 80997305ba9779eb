"""Cases about the tensors: precision, complex numbers, tensors without dimensions or elements, memory layout."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.behaviour.harness import Job, Registry, Run
from tests.behaviour.small_models import CLASSES, FEATURES, HIDDEN, ROWS, class_batches, loss_of, mlp, sgd, usual_job

registry = Registry()
case = registry.add


@case()
def bf16_autocast(run: Run) -> Job:
    module = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.LayerNorm(HIDDEN), nn.GELU(), nn.Linear(HIDDEN, CLASSES))
    model, opt = run.model(module), sgd(module)

    @run.compile
    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(x)
            loss = nn.functional.cross_entropy(logits, y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss, logits

    return Job(step=step, batches=class_batches(run), objects={"model": module, "opt": opt})


@case()
def autocast_reads_weights_twice(run: Run) -> Job:
    """Each weight is cast once, so that its gradients are added in half precision; with the cache off, in float32."""
    module = mlp()
    model, opt = run.model(module), sgd(module)

    @run.compile
    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, x, y) + loss_of(model, x * 2 + 1, y)
        loss.backward()
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            more = loss_of(model, x - 1, y) + loss_of(model, x * 3, y)
        more.backward()
        opt.step()
        opt.zero_grad()
        return loss + more

    return Job(step=step, batches=class_batches(run), objects={"model": module, "opt": opt})


@case(traces=(2,))
def autocast_of_the_caller(run: Run) -> Job:
    """Autocast around the call, on and off in turn, is part of what the step means."""
    job = usual_job(run, mlp(), calls=4)
    calls = [0]

    def caller(*batch: object) -> object:
        calls[0] += 1
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=calls[0] % 2 == 0):
            return job.step(*batch)

    return Job(step=caller, batches=job.batches, objects=job.objects)


@case()
def loss_without_the_autocast_of_the_caller(run: Run) -> Job:
    """What a step keeps out of autocast stays out of it in every call, here the backward, too."""
    module = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, CLASSES))
    model, opt = run.model(module), sgd(module)

    @run.compile
    def step(x: Tensor, y: Tensor) -> Tensor:
        hidden = model(x)
        with torch.autocast("cpu", enabled=False):
            loss = nn.functional.cross_entropy(hidden.float() @ hidden.float().t(), y)
            loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    def caller(*batch: object) -> object:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return step(*batch)

    return Job(step=caller, batches=class_batches(run), objects={"model": module, "opt": opt})


def cast_job(run: Run, module: nn.Module, dtype: torch.dtype) -> Job:
    job = usual_job(run, module.to(dtype))
    batches = [(x.to(dtype), y) for x, y in job.batches]  # type: ignore[attr-defined]
    return Job(step=job.step, batches=batches, objects=job.objects)


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
    module = Complex()
    model, opt = run.model(module), torch.optim.Adam(module.parameters(), lr=1e-2)

    @run.compile
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return Job(step=step, batches=class_batches(run), objects={"model": module, "opt": opt})


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
    module = mlp()
    model, opt = run.model(module), sgd(module, weight_decay=0.1)

    @run.compile
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().sum()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return Job(step=step, batches=run.batches(3, (0, FEATURES)), objects={"model": module, "opt": opt})


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
    model, opt = run.model(module), sgd(module)

    @run.compile
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    batches = run.batches(3, (ROWS, 3, 6, 6), classes=CLASSES)
    batches = [(x.to(memory_format=torch.channels_last), y) for x, y in batches]
    return Job(step=step, batches=batches, objects={"model": module, "opt": opt})
