"""Random generators go on where they stood, on as many ranks and on others."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from wholestep.errors import CheckpointError
from wholestep.runtime.checkpoint import random_state

CPU = torch.device("cpu")


def draw() -> list[float]:
    return [float(torch.rand(())), random.random(), random.gauss(0, 1), float(np.random.normal())]


def seeded(seed: int) -> random_state.State:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    return random_state.state(CPU)


def test_all_generators_go_on() -> None:
    seeded(3)
    draw()  # gauss and normal draw two numbers at a time, and keep one
    saved = random_state.state(CPU)
    want = draw()
    seeded(4)
    random_state.restore(saved, CPU)
    assert draw() == want


def test_other_numbers_of_ranks() -> None:
    alike, apart = [seeded(5)] * 2, [seeded(6), seeded(7)]
    assert random_state.for_rank(alike, 3) is alike[0]
    assert random_state.for_rank(apart, 1) is apart[1]
    drawn = []
    for rank in range(4):
        random_state.restore(random_state.for_rank(apart, rank), CPU)
        drawn.append(tuple(draw()))
    assert len(set(drawn)) == 4
    random_state.restore(random_state.for_rank(apart, 3), CPU)
    assert tuple(draw()) == drawn[3]


def test_a_generator_of_another_kind_is_named() -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        with pytest.raises(CheckpointError, match="PCG64"):
            random_state.state(CPU)
    finally:
        np.random.set_bit_generator(before)
