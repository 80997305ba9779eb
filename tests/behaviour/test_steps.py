"""Every form of step, model and call against plain eager code on one process."""

from __future__ import annotations

import pytest

from tests.behaviour.cases import STEP_CASES
from tests.behaviour.harness import Run, check


@pytest.mark.parametrize(
    ("name", "may_go_live"), [pytest.param(name, case.live, id=name) for name, case in STEP_CASES.items()]
)
def test_equals_eager(name: str, may_go_live: bool) -> None:
    complaints = check(STEP_CASES[name], Run())
    assert not complaints, "\n".join(complaints)
