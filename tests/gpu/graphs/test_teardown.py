"""Process groups end although compiled steps live on whose CUDA graphs hold their collectives."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import wholestep as ws
from tests.harness.rank_pools import needs_gpus

pytestmark = pytest.mark.gpu

LIVES_ON: list[object] = []
CALLS = 5


def train_step(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss


def end_with_a_graph(by_world: bool) -> tuple[float, list[float]]:
    """Seconds that the end of the process group takes, and the losses before it."""
    world = ws.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).to(world.device)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # Copy engines put no kernel of NCCL into the graph.
    step = ws.compile(train_step, strategy=ws.DDP(), backend=ws.Inductor(copy_engines=False))
    LIVES_ON.append(step)
    x, y = torch.randn(4, 8, device=world.device), torch.randn(4, 2, device=world.device)
    losses = [float(step(model, opt, x, y)) for _ in range(CALLS)]
    assert step.explain().backend.endswith("one CUDA graph")
    start = time.perf_counter()
    if by_world:
        world.close()
    else:
        dist.destroy_process_group()
    return time.perf_counter() - start, losses


@pytest.mark.parametrize("by_world", [True, False], ids=["World.close", "destroy_process_group"])
def test_a_step_that_lives_on_keeps_no_group(by_world: bool) -> None:
    needs_gpus(2)
    for seconds, losses in ws.run(end_with_a_graph, 2, by_world, timeout_s=60.0):
        assert seconds < 5.0
        assert losses == sorted(losses, reverse=True)
