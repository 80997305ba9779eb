"""Tensors in objects, in random steps, against eager code: every value that somebody may have kept."""

from __future__ import annotations

from functools import partial

import pytest

import wholestep as ws
from tests.random_objects import RandomObjects

SEEDS = 240
PER_TEST = 30


@pytest.mark.parametrize("first", range(0, SEEDS, PER_TEST))
def test_equals_eager(first: int) -> None:
    compile = partial(ws.compile, backend="eager", max_retraces=30)
    for seed in range(first, first + PER_TEST):
        made = RandomObjects(seed)
        assert RandomObjects(seed).run(compile) == made.run(), f"seed {seed}: {made}"
