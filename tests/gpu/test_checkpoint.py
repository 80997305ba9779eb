"""Checkpoints on GPUs: a CUDA graph goes on where it was, in the same memory; generators of GPUs go on too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.distributed.tensor import DTensor

import wholestep as ws
from wholestep.config import Strategy

pytestmark = pytest.mark.gpu

CALLS = 6
"""More than a step takes until its graph is captured."""


def net(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Dropout(0.3), nn.Linear(96, 8)).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def train_step(model: Any, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def losses(step: Any, model: nn.Module, opt: torch.optim.Optimizer, count: int = 3) -> list[float]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    draw = torch.Generator().manual_seed(rank)
    return [float(step(model, opt, torch.randn(32, 64, generator=draw).cuda())) for _ in range(count)]


def between_calls(strategy: Strategy | None, path: Path, asynchronous: bool) -> tuple[bool, int, bool]:
    """Whether a graph goes on with the same losses after a load, its captures, and whether parameters stay there."""
    model, opt = net()
    step = ws.compile(train_step, strategy=strategy, fullgraph=True)
    losses(step, model, opt, CALLS)
    pending = ws.save_checkpoint(path, model, opt, step, asynchronous=asynchronous)
    want = losses(step, model, opt)
    pending.result()
    places = [_local(one).data_ptr() for one in model.parameters()]
    ws.load_checkpoint(path, model, opt, step)
    found = losses(step, model, opt)
    stay = places == [_local(one).data_ptr() for one in model.parameters()]
    return found == want, step.cache_info().traces, stay


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_cuda_graph_goes_on(tmp_path: Path, asynchronous: bool) -> None:
    assert between_calls(None, tmp_path / "run", asynchronous) == (True, 1, True)


@pytest.mark.parametrize("strategy", [ws.DDP(), ws.ZeRO(), ws.FSDP()], ids=lambda one: type(one).__name__)
def test_graphs_of_two_ranks_go_on(nccl2: Any, tmp_path: Path, strategy: Strategy) -> None:
    assert nccl2.run(between_calls, strategy, tmp_path / "run", True) == [(True, 1, True)] * 2


@pytest.mark.parametrize("cuda_graph", ["auto", False])
@inductor_config.patch(deterministic=True)
def test_a_training_is_resumed(tmp_path: Path, cuda_graph: Any) -> None:
    """A CUDA graph draws what the calls before its capture would have drawn.

    Two compiled steps have the same bits where no kernel is chosen by its time: sums in other blocks round otherwise.
    """
    compiled = [ws.compile(train_step, backend=ws.Inductor(cuda_graph=cuda_graph), fullgraph=True) for _ in range(2)]
    model, opt = net()
    losses(compiled[0], model, opt)
    ws.save_checkpoint(tmp_path / "run", model, opt, compiled[0])
    want = losses(compiled[0], model, opt)
    other, other_opt = net(1)
    ws.load_checkpoint(tmp_path / "run", other, other_opt, compiled[1])
    assert losses(compiled[1], other, other_opt) == want
