"""Tensors in objects, in random steps, against eager code: every value that somebody may have kept."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import wholestep as ws
from tests.fuzz.random_objects import RandomObjects

SEEDS = 60
PER_TEST = 30
FAULTS = (10227, 10346)
"""Of 1,500 seeds these showed a fault that had no test of its own."""
ROUNDING = 1e-12
"""Of float64 through five small steps, which CUDA graphs of compiled kernels round otherwise."""

CPU = torch.device("cpu")


@pytest.fixture
def may_go_live() -> bool:
    """Whether steps that a test compiles may go live: those that write to Python do."""
    return True


def compare(seed: int, device: torch.device, backend: ws.config.Backend, tolerance: float = 0.0) -> None:
    compile = partial(ws.compile, backend=backend, max_retraces=30)
    made, compiled = RandomObjects(seed), RandomObjects(seed)
    wanted, found = made.run(device), compiled.run(device, compile)
    assert all(map(partial(torch.allclose, rtol=tolerance, atol=tolerance), found, wanted)), f"seed {seed}: {made}"


@pytest.mark.parametrize("first", range(0, SEEDS, PER_TEST))
def test_equals_eager(first: int) -> None:
    for seed in range(first, first + PER_TEST):
        compare(seed, CPU, "eager")


@pytest.mark.parametrize("seed", FAULTS)
def test_seeds_that_showed_faults_equal_eager_code(seed: int) -> None:
    compare(seed, CPU, "eager")


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(1000, 1040, 10))
def test_equals_eager_on_a_gpu(first: int) -> None:
    """In CUDA graphs, which leave what they write in memory of their own."""
    for seed in range(first, first + 10):
        compare(seed, torch.device("cuda"), "inductor", ROUNDING)
