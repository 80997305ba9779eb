"""The cases of tests/behaviour on two ranks under sharded strategies, against eager DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import pytest

import wholestep as ws
from tests.behaviour.cases import OPTIM_CASES, STEP_CASES
from tests.behaviour.harness import EagerDDP, check
from wholestep.config import Strategy

CASES = {**STEP_CASES, **OPTIM_CASES}
STRATEGIES: dict[str, Strategy] = {
    "fsdp_keep": ws.FSDP(reshard_after_forward=False),
    "fsdp_again": ws.FSDP(reshard_after_forward=True),
    "zero1": ws.ZeRO(),
    "zero2": ws.ZeRO(stage=2),
}

APART = {"gradient_edited_by_hand"}
"""Cases in which each rank adds random numbers of its own to reduced gradients: under DistributedDataParallel the
parameters drift apart, and sharded ones cannot."""

NAMES = [name for name, case in CASES.items() if case.ranks and name not in APART]

pytestmark = pytest.mark.ranks


def complaints(name: str, strategy: str) -> list[str]:
    """Runs on every rank. An error of wholestep is told in words, so that the ranks stay usable."""
    try:
        return check(CASES[name], EagerDDP(), STRATEGIES[strategy])
    except ws.WholestepError as error:
        return [f"{type(error).__name__}: {error}"]


IN_TURN = [(name, [*STRATEGIES][place % len(STRATEGIES)]) for place, name in enumerate(NAMES)]
"""Every case under one of the strategies."""
UNDER_ALL = ("gradients_never_zeroed", "zero_grad_to_zeros_at_start", "clip_norm", "batch_norm", "tied_weights")
"""Cases that go another way under each of them."""
CHOSEN = [*IN_TURN, *((name, one) for name in UNDER_ALL for one in STRATEGIES if (name, one) not in IN_TURN)]


@pytest.mark.parametrize(("name", "strategy"), CHOSEN)
def test_equals_eager_ddp(pool2: Any, name: str, strategy: str) -> None:
    found = pool2.run(complaints, name, strategy)
    told = [f"rank {rank}: {one}" for rank, ones in enumerate(found) for one in ones]
    assert not told, "\n".join(told)
