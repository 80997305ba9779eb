"""Numbers of Python that the step moves, on a GPU: they are counted on the host while a CUDA graph does the rest."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from tests.behaviour.cases.counters import SCHEDULES, Adamlike, numbers
from tests.gpu.switches import deterministic
from tests.harness.rank_pools import needs_gpus

pytestmark = pytest.mark.gpu

STEPS, WIDTH = 9, 24


def net(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 48), nn.Tanh(), nn.Linear(48, WIDTH)).to(device)


class Loop:
    """One training: what moves is a count of its own, the numbers of its optimizer, and its scheduler's."""

    def __init__(self, device: torch.device, schedule: str | None, *, ddp: bool = False, fused: bool = False) -> None:
        self.module = net(device)
        self.model = DistributedDataParallel(self.module, device_ids=[device.index]) if ddp else self.module
        if schedule is None:
            self.opt: torch.optim.Optimizer = Adamlike(self.module.parameters())
            self.scheduler = None
        else:
            self.opt = torch.optim.AdamW(self.module.parameters(), lr=0.02, fused=fused)
            self.scheduler = SCHEDULES[schedule](self.opt)
        self.steps, self.average = 0, 0.0

    def step(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.average += (1 / self.steps - self.average) / (self.steps + 1)
        loss = (self.model(x) - x).square().mean()
        (loss * (1 + self.average)).backward()
        self.opt.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.opt.zero_grad()
        return loss.detach()

    def seen(self) -> object:
        held = None
        if self.scheduler is not None:
            shown = {key: value for key, value in self.scheduler.state_dict().items() if key != "_schedulers"}
            held = copy.deepcopy((shown, self.scheduler.get_last_lr()))
        return repr((self.steps, self.average, held, numbers(self.opt)()))


def train(loop: Loop, step: Callable[[Tensor], Tensor], rank: int = 0) -> tuple[list[Tensor], list[object]]:
    device = next(loop.module.parameters()).device
    losses, seen = [], []
    for number in range(STEPS):
        if number == 6:  # set from outside between calls
            loop.steps = 2
        generator = torch.Generator("cpu").manual_seed(100 * number + rank)
        losses.append(step(torch.randn(16, WIDTH, generator=generator, device="cpu").to(device)).clone())
        seen.append(loop.seen())
    return [*losses, *(p.detach() for p in loop.module.parameters())], seen


def test_a_default_device_is_not_taken_for_ours() -> None:
    """Numbers of the host stay on the host, the counters of optimizers too."""
    device, found = torch.device("cuda", 0), []
    for context in (nullcontext(), device):
        loop = Loop(device, "step", fused=False)
        step = ws.compile(loop.step, backend="inductor")
        with context:
            found.append(train(loop, step))
    assert step.explain().backend == "inductor, one CUDA graph"
    assert found[0][1] == found[1][1]
    assert all(torch.equal(one, other) for one, other in zip(found[0][0], found[1][0], strict=True))


def race(
    schedule: str | None, backend: Any, device: torch.device, *, ddp: bool = False, fused: bool = False
) -> tuple[float, bool, str]:
    """The largest relative difference of losses and parameters, whether all numbers are equal, and the backend."""
    rank = torch.distributed.get_rank() if ddp else 0
    with deterministic():
        wanted = Loop(device, schedule, ddp=ddp, fused=fused)
        tensors, seen = train(wanted, wanted.step, rank)
        ours = Loop(device, schedule, fused=fused)
        step: Any = ws.compile(ours.step, backend=backend)
        found, counted = train(ours, step, rank)
    worst = max(
        ((a - b).abs().max() / b.abs().max().clamp_min(1e-3)).item() for a, b in zip(found, tensors, strict=True)
    )
    return worst, seen == counted, step.explain().backend


@pytest.mark.parametrize("schedule", [None, *SCHEDULES])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_one_gpu_counts_as_eager_code_does(backend: Any, schedule: str | None) -> None:
    worst, equal, ran = race(schedule, backend, torch.device("cuda", 0))
    assert equal
    assert worst <= (0.0 if backend == "eager" else 2e-4)
    assert ("one CUDA graph" in ran) == (backend == "inductor")


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_fused_kernel_takes_the_rate_that_the_step_computes(backend: Any) -> None:
    worst, equal, ran = race("one_cycle", backend, torch.device("cuda", 0), fused=True)
    assert equal
    assert worst <= (0.0 if backend == "eager" else 2e-4)
    assert ("one CUDA graph" in ran) == (backend == "inductor")


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_numbers_that_move_between_calls_are_inputs_of_the_graph(backend: Any) -> None:
    device = torch.device("cuda", 0)

    def trained(compiled: Callable[[Any], Any]) -> tuple[Any, list[Tensor]]:
        module = net(device)
        opt = torch.optim.AdamW(module.parameters(), lr=0.02)
        held = {"weight": 1.0}

        def step(x: Tensor, beta: float, number: int) -> Tensor:
            loss = (module(x) - x).square().mean() * held["weight"] + beta * module(x).abs().mean()
            if number % 3 == 2:
                loss = loss * 2
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss.detach()

        run, losses = compiled(step), []
        for number in range(STEPS):
            held["weight"] = 1 + number / 4
            x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(number)).to(device)
            losses.append(run(x, 1 / (1 + number), number).clone())
        return run, [*losses, *(p.detach() for p in module.parameters())]

    with deterministic():
        _, wanted = trained(lambda step: step)
        run, found = trained(lambda step: ws.compile(step, backend=backend))
    worst = max(
        ((a - b).abs().max() / b.abs().max().clamp_min(1e-3)).item() for a, b in zip(found, wanted, strict=True)
    )
    assert worst <= (0.0 if backend == "eager" else 2e-4)
    assert run.cache_info().traces + run.cache_info().loaded == 3  # constants, inputs, inputs with the other branch
    assert ("one CUDA graph" in run.explain().backend) == (backend == "inductor")


def _on_rank(schedule: str | None, backend: Any) -> tuple[float, bool, str]:
    world = ws.init()
    torch.cuda.set_device(world.device)
    return race(schedule, backend, world.device, ddp=True)


@pytest.mark.parametrize("schedule", [None, "one_cycle"])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_two_gpus_count_as_eager_ddp_does(backend: Any, schedule: str | None) -> None:
    needs_gpus(2)
    for worst, equal, ran in ws.run(_on_rank, 2, schedule, backend):
        assert equal
        assert worst <= 2e-4  # DDP's gradients are views of buckets: norms and sums may differ in their last bits
        assert ("one CUDA graph" in ran) == (backend == "inductor")
