"""Architectures of Hugging Face transformers on two ranks, against eager DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import pytest

import wholestep as ws
from tests.behaviour.harness import EagerDDP, check
from tests.behaviour.transformers_cases import registry

pytestmark = pytest.mark.ranks


def complaints(name: str) -> list[str]:
    """Runs on every rank. An error of wholestep is told in words, so that the ranks stay usable."""
    try:
        return check(registry.cases[name], EagerDDP())
    except ws.WholestepError as error:
        return [f"{type(error).__name__}: {error}"]


def chosen() -> list[str]:
    """Of each architecture what draws numbers, as training does; the rest of `tests/behaviour/test_transformers.py`
    says more of one process than of two."""
    names = [*registry.cases]
    return [name for name in names if not {f"{name}_dropout", f"{name}_draws"} & {*names} and name != "bart_draws"]


@pytest.mark.parametrize("name", chosen())
def test_equals_eager_ddp(pool2: Any, name: str) -> None:
    found = pool2.run(complaints, name)
    told = [f"rank {rank}: {one}" for rank, ones in enumerate(found) for one in ones]
    assert not told, "\n".join(told)
