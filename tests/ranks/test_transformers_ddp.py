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


WITH_DROPOUT = ("ast", "deberta", "opt", "wav2vec2", "whisper")
"""With dropout alone, which takes long enough."""


@pytest.mark.parametrize("name", [name for name in registry.cases if name not in (*WITH_DROPOUT, "bart_draws")])
def test_equals_eager_ddp(pool2: Any, name: str) -> None:
    found = pool2.run(complaints, name)
    told = [f"rank {rank}: {one}" for rank, ones in enumerate(found) for one in ones]
    assert not told, "\n".join(told)
