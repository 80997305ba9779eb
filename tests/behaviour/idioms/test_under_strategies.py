"""Idioms that touch modules and parameters do the same where those are cut over two ranks.

``python -m benchmarks.idiom_table --strategy fsdp`` runs all of them, under any strategy.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.idioms import IDIOMS
from benchmarks.idioms.base import batch, batches_of_rank_0
from benchmarks.idioms.on_ranks import outcome_of_a_rank

pytestmark = pytest.mark.ranks

SHOWN = 20


@pytest.mark.parametrize("name", [name for name, one in IDIOMS.items() if one.group == "hooks_and_modules"])
def test_an_idiom_under_fsdp_does_what_eager_code_does(pool2: Any, name: str) -> None:
    for rank, found in enumerate(pool2.run(outcome_of_a_rank, name, "fsdp")):
        assert not found.complaints, "\n".join([f"rank {rank}", *found.complaints[:SHOWN]])


def batches() -> tuple[torch.Tensor, torch.Tensor]:
    with batches_of_rank_0():
        alike = batch(dist.get_world_size())[0]
    return alike, batch(dist.get_world_size())[0]


def test_ranks_have_the_same_batches_where_they_shall(pool2: Any) -> None:
    (alike, own), (alike_there, own_there) = pool2.run(batches)
    assert torch.equal(alike, alike_there)
    assert not torch.equal(own, own_there)
