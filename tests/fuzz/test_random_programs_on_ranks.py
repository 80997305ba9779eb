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

pytestmark = pytest.mark.ranks

FOUND = {
    "state is loaded in the step": (127, "fsdp"),
    "a gather is needed by a later reduction": (5001065, "fsdp"),
    "a penalty beside a view of data": (5014029, "fsdp"),
    "a view of a weight, and its data": (5005071, "fsdp"),
}
"""Seeds that have shown a fault, and what it was."""


@pytest.mark.parametrize(("seed", "strategy"), FOUND.values(), ids=FOUND)
def test_what_was_wrong_once_is_right(pool2: Any, seed: int, strategy: str) -> None:
    for found in pool2.run(judged_on_a_rank, random_program(seed), strategy):
        assert found.holds, found.told
        assert not found.kind.startswith("discarded")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("seed", range(7000, 7002))
def test_a_program_does_what_eager_code_does(pool2: Any, seed: int, strategy: str) -> None:
    for found in pool2.run(judged_on_a_rank, random_program(seed), strategy):
        assert found.holds, found.told


def sums_are_found() -> bool:
    return not judged(random_program(7001), ws.FSDP(reduce="sum")).holds


def test_gradients_that_are_sums_are_a_difference(pool2: Any) -> None:
    assert pool2.run(sums_are_found) == [True, True]
