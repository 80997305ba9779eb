"""Random training loops give what eager code gives, whatever their owner does between calls."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import wholestep as ws
from tests.random_loops import RandomLoop, difference


def compare(seed: int, device: torch.device, backend: ws.config.Backend) -> None:
    wanted = RandomLoop(seed, device).run(lambda step: step)
    found = RandomLoop(seed, device).run(partial(ws.compile, backend=backend, max_retraces=64))
    assert difference(found, wanted) is None


@pytest.mark.parametrize("seed", range(14))
def test_loops_on_the_cpu(seed: int) -> None:
    compare(seed, torch.device("cpu"), "eager")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(100, 124))
def test_loops_on_a_gpu(seed: int) -> None:
    """In CUDA graphs, which leave gradients and results in memory that the next call writes to."""
    compare(seed, torch.device("cuda"), "inductor")
