"""Random training loops give what eager code gives, whatever their owner does between calls."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from tests.fuzz.random_loops import RandomLoop, difference


@pytest.fixture
def may_go_live() -> bool:
    """Whether steps that a test compiles may go live: those that write to Python do."""
    return True


def compare(seed: int, device: torch.device, backend: ws.config.Backend) -> None:
    wanted = RandomLoop(seed, device).run(lambda step: step)
    found = RandomLoop(seed, device).run(partial(ws.compile, backend=backend, max_retraces=64))
    assert difference(found, wanted) is None


@pytest.mark.parametrize("seed", range(14))
def test_loops_on_the_cpu(seed: int) -> None:
    compare(seed, torch.device("cpu"), "eager")


def on_two_ranks(seed: int, backend: ws.config.Backend = "eager") -> str | None:
    device, rank = ws.init().device, dist.get_rank()
    wrap = partial(DistributedDataParallel, find_unused_parameters=True)
    wanted = RandomLoop(seed, device, rank=rank).run(lambda step: step, wrap)
    own = RandomLoop(seed, device, rank=rank)
    found = own.run(partial(ws.compile, backend=backend, max_retraces=64), lambda model: model)
    return difference(found, wanted)


@pytest.mark.parametrize("seed", range(200, 204))
def test_loops_on_two_ranks(pool2: Any, seed: int) -> None:
    assert pool2.run(on_two_ranks, seed) == [None, None]


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(100, 124))
def test_loops_on_a_gpu(seed: int) -> None:
    """In CUDA graphs, which leave gradients and results in memory that the next call writes to."""
    compare(seed, torch.device("cuda"), "inductor")


@pytest.mark.gpu
@pytest.mark.parametrize("copy_engines", ["auto", False], ids=["copies", "nccl"])
@pytest.mark.parametrize("seed", range(300, 316))
def test_loops_on_two_gpus(nccl2: Any, seed: int, copy_engines: Any) -> None:
    assert nccl2.run(on_two_ranks, seed, ws.Inductor(copy_engines=copy_engines)) == [None, None]
