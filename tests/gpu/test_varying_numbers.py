"""Numbers that move between calls, on a GPU: they are read on the host while a CUDA graph does the rest."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.gpu.switches import deterministic

pytestmark = pytest.mark.gpu

STEPS, WIDTH = 9, 24


def net(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 48), nn.Tanh(), nn.Linear(48, WIDTH)).to(device)


def batch(number: int, device: torch.device) -> Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator("cpu").manual_seed(number), device="cpu").to(device)


def test_a_default_device_is_not_taken_for_ours() -> None:
    """Numbers of the host stay on the host, the counters of optimizers too."""
    device, found = torch.device("cuda", 0), []
    for context in (nullcontext(), device):
        module = net(device)
        opt = torch.optim.AdamW(module.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(opt, 2)

        @ws.compile(backend="inductor", fullgraph=True)
        def step(x: Tensor, weight: float) -> Tensor:
            loss = (module(x) - x).square().mean() * weight  # noqa: B023
            loss.backward()
            opt.step()  # noqa: B023
            opt.zero_grad()  # noqa: B023
            return loss.detach()

        losses = []
        for number in range(STEPS):
            x = batch(number, device)
            with context:
                losses.append(step(x, 1 / (1 + number)).clone())
            scheduler.step()
        found.append([*losses, *(param.detach() for param in module.parameters())])
    assert step.explain().backend == "inductor, one CUDA graph"
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


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
            losses.append(run(batch(number, device), 1 / (1 + number), number).clone())
        return run, [*losses, *(p.detach() for p in module.parameters())]

    with deterministic():
        _, wanted = trained(lambda step: step)
        run, found = trained(lambda step: ws.compile(step, backend=backend, fullgraph=True))
    worst = max(
        ((a - b).abs().max() / b.abs().max().clamp_min(1e-3)).item() for a, b in zip(found, wanted, strict=True)
    )
    assert worst <= (0.0 if backend == "eager" else 2e-4)
    assert run.cache_info().traces + run.cache_info().loaded == 3  # constants, inputs, inputs with the other branch
    assert ("one CUDA graph" in run.explain().backend) == (backend == "inductor")
