"""The cases of tests/behaviour on two ranks with different data, against eager DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import pytest

import wholestep as ws
from tests.behaviour.cases import OPTIM_CASES, STEP_CASES
from tests.behaviour.harness import EagerDDP, check

CASES = {**STEP_CASES, **OPTIM_CASES}

pytestmark = pytest.mark.ranks


def complaints(name: str) -> list[str]:
    """Runs on every rank. An error of wholestep is told in words, so that the ranks stay usable."""
    try:
        return check(CASES[name], EagerDDP())
    except ws.WholestepError as error:
        return [f"{type(error).__name__}: {error}"]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.ranks])
def test_equals_eager_ddp(pool2: Any, name: str) -> None:
    found = pool2.run(complaints, name)
    told = [f"rank {rank}: {one}" for rank, ones in enumerate(found) for one in ones]
    assert not told, "\n".join(told)
