"""Training functions as they are published, unmodified and without fullgraph, against eager code."""

from __future__ import annotations

import pytest

from benchmarks.idioms.compare import differences, outcome, play
from tests.behaviour.training_functions import TRAININGS

CALLS = 6
SHOWN = 20
"""Complaints that a failure prints."""


@pytest.fixture
def may_go_live() -> bool:
    """Whether steps that a test compiles may go live: most of these do."""
    return True


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_function_does_what_eager_code_does(name: str) -> None:
    found = outcome(TRAININGS[name], calls=CALLS)
    assert found.holds, "\n".join(found.complaints[:SHOWN])


@pytest.mark.parametrize("name", TRAININGS)
def test_it_trains_and_repeats_itself(name: str) -> None:
    first, again = (play(TRAININGS[name], lambda step: step, calls=3) for _ in range(2))
    assert differences(first, again) == []
    moved = [
        path
        for path in first[0]
        if "weight" in path and differences([{path: first[0][path]}], [{path: first[2][path]}])
    ]
    assert moved
