"""Random programs that two ranks train under a strategy do what eager code does on one.

``python -m benchmarks.random_programs --strategy fsdp`` runs thousands.
"""

from __future__ import annotations

from typing import Any

import pytest

import wholestep as ws
from benchmarks.random_programs.judge import judged
from benchmarks.random_programs.on_ranks import STRATEGIES, judged_on_a_rank
from benchmarks.random_programs.program import random_program
from benchmarks.random_programs.wrapped import WRAPPERS

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("strategy", [*STRATEGIES, *WRAPPERS])
@pytest.mark.parametrize("seed", range(7000, 7002))
def test_a_program_does_what_eager_code_does(pool2: Any, seed: int, strategy: str) -> None:
    for found in pool2.run(judged_on_a_rank, random_program(seed), strategy):
        assert found.holds, found.told


def sums_are_found() -> bool:
    return not judged(random_program(7001), ws.FSDP(reduce="sum")).holds


def test_gradients_that_are_sums_are_a_difference(pool2: Any) -> None:
    assert pool2.run(sums_are_found) == [True, True]
