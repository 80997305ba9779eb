"""Loops of Accelerate and of Fabric on two ranks: a step of their objects is one graph, with their numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import wholestep as ws
from tests.ranks.adapters.launched import launched

pytestmark = pytest.mark.ranks

NUM_BATCHES = 8


def parts() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, opt, torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1 + dist.get_rank())
    return [(torch.randn(8, 16), torch.randint(4, (8,))) for _ in range(NUM_BATCHES)]


def evaluated(model: nn.Module, x: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        found = model(x).sum().item()
    model.train()
    return found


def with_accelerate(accumulated: int, compiled: bool) -> tuple[list[float], Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
    model, opt, scheduler = accelerator.prepare(*parts())

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
        opt.step()
        opt.zero_grad()
        return loss.detach()

    run = ws.compile(step, fullgraph=True) if compiled else step
    found = []
    for number, (x, y) in enumerate(batches()):
        with accelerator.accumulate(model):
            found.append(run(x, y).item())
            scheduler.step()
        if number == 3:
            found.append(evaluated(model, x))
    return [*found, *scheduler.get_last_lr(), sums(model)], run


def with_fabric(accumulated: int, compiled: bool) -> tuple[list[float], Any]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    plain, plain_opt, scheduler = parts()
    model, opt = fabric.setup(plain, plain_opt)

    def step(x: Tensor, y: Tensor, is_last: bool) -> Tensor:
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = nn.functional.cross_entropy(model(x), y)
            fabric.backward(loss)
        if is_last:
            fabric.clip_gradients(model, opt, max_norm=0.1, error_if_nonfinite=False)
            opt.step()
            opt.zero_grad()
        return loss.detach()

    run = ws.compile(step, fullgraph=True) if compiled else step
    found = []
    for number, (x, y) in enumerate(batches(), start=1):
        is_last = number % accumulated == 0
        found.append(run(x, y, is_last).item())
        if is_last:
            scheduler.step()
        if number == 4:
            found.append(evaluated(model, x))
    return [*found, *scheduler.get_last_lr(), sums(model)], run


def sums(model: nn.Module) -> float:
    return sum(float(param.double().sum()) for param in model.parameters())


LOOPS = {"accelerate": with_accelerate, "lightning": with_fabric}


def both(package: str, accumulated: int) -> tuple[int, int, int]:
    with launched():
        wanted, _ = LOOPS[package](accumulated, False)
    with launched():
        found, step = LOOPS[package](accumulated, True)
    assert found == wanted  # bit by bit
    info = step.cache_info()
    return info.traces, info.hits, step.plan.count("all_reduce")


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("package", LOOPS)
def test_a_step_is_one_graph_with_the_numbers_of_the_loop(pool2: Any, package: str, accumulated: int) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed")
    for traces, hits, num_reductions in pool2.run(both, package, accumulated):
        assert traces + hits == NUM_BATCHES
        assert traces <= (1 if accumulated == 1 else 3)
        assert num_reductions == 1
