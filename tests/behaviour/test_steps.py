"""Every form of step, model and call against plain eager code on one process."""

from __future__ import annotations

import pytest

from tests.behaviour.cases import STEP_CASES
from tests.behaviour.harness import Run, check


@pytest.mark.parametrize("name", STEP_CASES)
def test_equals_eager(name: str) -> None:
    complaints = check(STEP_CASES[name], Run())
    assert not complaints, "\n".join(complaints)
