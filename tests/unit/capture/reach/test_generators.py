"""Steps that use a generator and leave it as it was: nothing of what they draw may be frozen."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import wholestep as ws
from wholestep.errors import CaptureError

OWN, NUMPYS, OLD, PYTHONS = torch.Generator(), np.random.default_rng(0), np.random.RandomState(0), random.Random(0)


def seeds_python(x: Tensor) -> Tensor:
    drawn = random.random()
    random.seed(0)
    return x * drawn


def puts_python_back(x: Tensor) -> Tensor:
    state = random.getstate()
    drawn = random.random()
    random.setstate(state)
    return x * drawn


def seeds_one_of_python(x: Tensor) -> Tensor:
    drawn = PYTHONS.uniform(1, 2)
    PYTHONS.seed(0)
    return x * drawn


def seeds_numpy(x: Tensor) -> Tensor:
    drawn = float(np.random.rand())
    np.random.seed(0)
    return x * drawn


def puts_numpy_back(x: Tensor) -> Tensor:
    state = np.random.get_state()
    drawn = float(np.random.normal())
    np.random.set_state(state)
    return x * drawn


def puts_one_of_numpy_back(x: Tensor) -> Tensor:
    state = NUMPYS.bit_generator.state
    drawn = float(NUMPYS.random())
    NUMPYS.bit_generator.state = state
    return x * drawn


def seeds_an_old_one_of_numpy(x: Tensor) -> Tensor:
    drawn = float(OLD.rand())
    OLD.seed(0)
    return x * drawn


def seeds_torch(x: Tensor) -> Tensor:
    drawn = torch.rand(3)
    torch.manual_seed(0)
    return x * drawn


def seeds_one_of_torch(x: Tensor) -> Tensor:
    drawn = torch.rand(3, generator=OWN)
    OWN.manual_seed(0)
    return x * drawn


def asks_torch_for_its_seed(x: Tensor) -> Tensor:
    return x * (torch.initial_seed() % 7)


def asks_one_of_torch_for_its_seed(x: Tensor) -> Tensor:
    return x * (OWN.initial_seed() % 7)


def asks_one_of_torch_for_its_state(x: Tensor) -> Tensor:
    return x * OWN.get_state()[8:11]


STEPS = (
    asks_torch_for_its_seed, asks_one_of_torch_for_its_seed, asks_one_of_torch_for_its_state,
    seeds_python, puts_python_back, seeds_one_of_python, seeds_numpy, puts_numpy_back, puts_one_of_numpy_back,
    seeds_an_old_one_of_numpy, seeds_torch, seeds_one_of_torch,
)  # fmt: skip


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    OWN.manual_seed(seed)
    OLD.seed(seed)
    PYTHONS.seed(seed)
    NUMPYS.bit_generator.state = np.random.default_rng(seed).bit_generator.state


def states() -> list[str]:
    """All generators, as text; numpy's legacy one with what it has in store."""
    with np.printoptions(threshold=10_000):
        numpys = [str(np.random.get_state(legacy=False)), str(OLD.get_state(legacy=False))]
    torchs = [str(one.get_state().tolist()) for one in (torch.default_generator, OWN)]
    return [str(random.getstate()), str(PYTHONS.getstate()), *numpys, *torchs, str(NUMPYS.bit_generator.state)]


def played(step: Callable[[Tensor], Tensor]) -> list[Any]:
    """Results and states of calls; the generators begin where the step leaves them, and move between two calls."""
    found: list[Any] = []
    seed_all(0)
    for call in range(4):
        if call == 2:
            seed_all(5)
        found += [step(torch.ones(3)).tolist(), states()]
    return found


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_nothing_that_is_drawn_is_frozen(step: Callable[[Tensor], Tensor], may_go_live: bool) -> None:
    assert played(ws.compile(step, backend="eager")) == played(step)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_one_graph_is_refused_and_leaves_all_generators_as_they_were(step: Callable[[Tensor], Tensor]) -> None:
    seed_all(0)
    np.random.normal()  # one in store
    before = states()
    with pytest.raises(CaptureError, match=r"draws from|seeds|bit_generator|for its seed or state"):
        ws.compile(step, backend="eager", fullgraph=True)(torch.ones(3))
    assert states() == before


class OwnBits(np.random.MT19937):
    """Bits that cannot be made with a seed alone."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(first + second)


def test_bits_that_cannot_be_copied_are_compared() -> None:
    numbers = np.random.Generator(OwnBits(1, 2))
    with pytest.raises(CaptureError, match="draws from numbers"):
        ws.compile(lambda x: x * float(numbers.random()), backend="eager", fullgraph=True)(torch.ones(3))
    assert float(numbers.random()) == float(np.random.Generator(OwnBits(1, 2)).random())


def test_a_generator_that_the_step_makes_is_its_own() -> None:
    def step(x: Tensor) -> Tensor:
        return x * random.Random(3).random() * float(np.random.default_rng(3).random())

    compiled = ws.compile(step, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(3)), step(torch.ones(3)))


def test_a_trace_moves_no_generator() -> None:
    seed_all(7)
    np.random.normal()
    before = states()
    ws.compile(lambda x: x * 2, backend="eager", fullgraph=True)(torch.ones(3))
    assert states() == before
    assert float(NUMPYS.random()) == float(np.random.default_rng(7).random())
