"""Random steps that write to their arguments give what eager code gives."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import wholestep as ws
from tests.fuzz.random_writes import RandomCalls, RandomWrites

ROUNDING = 1e-12


CPU = torch.device("cpu")
LOST = (0, 2, 20, 23, 33, 51, 53, 1006, 1010, 1039)
"""Of 120 seeds those in which Inductor of torch 2.11 or 2.13 loses a value if nothing is done about it."""

LOST_CALLS = (643, 767, 831, 832)
"""Likewise, of `RandomCalls`: rows of a tensor are put where others of it lie."""


def compare(
    seed: int, backend: ws.config.Backend, device: torch.device = CPU, *, kind: type[RandomWrites] = RandomWrites
) -> None:
    made = kind(seed)
    wanted, found = made.run(device), made.run(device, partial(ws.compile, backend=backend, fullgraph=True))
    for call, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        same = all(map(partial(torch.allclose, rtol=ROUNDING, atol=ROUNDING), ours, theirs))
        assert same, f"seed {seed}, call {call}: {made.text}"


@pytest.mark.parametrize("first", range(0, 100, 50))
def test_equals_eager(first: int) -> None:
    for seed in range(first, first + 50):
        compare(seed, "eager")


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_other_calls_equal_eager(first: int) -> None:
    for seed in range(first, first + 20):
        compare(seed, "eager", kind=RandomCalls)


@pytest.mark.parametrize("seed", [*LOST_CALLS, 3000, 3001])
def test_inductor_loses_no_value_of_other_calls(seed: int) -> None:
    compare(seed, "inductor", kind=RandomCalls)


@pytest.mark.parametrize("seed", LOST)
def test_inductor_loses_no_value(seed: int) -> None:
    compare(seed, "inductor")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [*LOST, *range(2000, 2008)])
def test_equals_eager_on_a_gpu(seed: int) -> None:
    compare(seed, "inductor", torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [*LOST_CALLS, *range(3000, 3008)])
def test_other_calls_equal_eager_on_a_gpu(seed: int) -> None:
    compare(seed, "inductor", torch.device("cuda"), kind=RandomCalls)
