"""Architectures of Hugging Face transformers on two ranks, against eager DistributedDataParallel.

With dropout where they have any, since its masks are what differs between ranks; two of them without it, too: attention
is another operator then. All are compared without it on one process.
"""

from __future__ import annotations

from typing import Any

import pytest

import wholestep as ws
from tests.behaviour.cases_hf import registry
from tests.behaviour.harness import EagerDDP, check

pytestmark = pytest.mark.ranks

WITHOUT_DROPOUT = ("bert", "gpt2")
NAMES = [name for name in registry.cases if f"{name}_dropout" not in registry.cases or name in WITHOUT_DROPOUT]


def complaints(name: str) -> list[str]:
    """Runs on every rank. An error of wholestep is told in words, so that the ranks stay usable."""
    try:
        return check(registry.cases[name], EagerDDP())
    except ws.WholestepError as error:
        return [f"{type(error).__name__}: {error}"]


@pytest.mark.parametrize("name", NAMES)
def test_equals_eager_ddp(pool2: Any, name: str) -> None:
    found = pool2.run(complaints, name)
    told = [f"rank {rank}: {one}" for rank, ones in enumerate(found) for one in ones]
    assert not told, "\n".join(told)
