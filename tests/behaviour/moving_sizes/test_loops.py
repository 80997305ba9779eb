"""Loops over batches of random sizes equal eager code after each of 30 calls, with few traces."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import wholestep as ws
from tests.behaviour.harness import Compiled, EagerDDP, Run, compare
from tests.behaviour.moving_sizes.conditions import asked_behind_capture
from tests.behaviour.moving_sizes.loops import LOOPS

ALONE = [pytest.param(name, case.live, id=name) for name, case in LOOPS.cases.items()]
ON_RANKS = [name for name, case in LOOPS.cases.items() if case.ranks]


class WithSGD(EagerDDP):
    """AdamW makes steps of gradients that are nothing but rounding, such as those of the biases of keys."""

    optimizer = torch.optim.SGD


class CompiledWithSGD(Compiled):
    optimizer = torch.optim.SGD


def complaints(name: str, backend: Any, on_ranks: bool = False) -> list[str]:
    return of_pair(name, EagerDDP() if on_ranks else Run(), Compiled(backend, live=LOOPS.cases[name].live))


def of_shards(name: str, strategy: Any) -> list[str]:
    """The norm of all gradients is a sum over shards, which rounds otherwise."""
    return of_pair(name, WithSGD(), CompiledWithSGD("eager", strategy=strategy), rounds=True)


def of_pair(name: str, eager: Any, compiled: Compiled, *, rounds: bool = False) -> list[str]:
    case = LOOPS.cases[name]
    try:
        found = compare(case, eager, compiled, rounds=rounds)
    except ws.WholestepError as error:  # told in words, so that ranks stay usable
        return [f"{type(error).__name__}: {error}"]
    if case.traces and compiled.traces not in case.traces:
        reasons = [reason for step in compiled.steps for reason in step.cache_info().reasons]
        found.append(f"traced {compiled.traces} times: {reasons}")
    found += [f"asked after capture: {text}" for step in compiled.steps for text in asked_behind_capture(step)]
    return found


@pytest.mark.parametrize(("name", "may_go_live"), ALONE)
def test_equals_eager_code(name: str, may_go_live: bool) -> None:
    found = complaints(name, "eager")
    assert not found, "\n".join(found)


@pytest.mark.ranks
@pytest.mark.parametrize("name", ON_RANKS)
def test_ranks_with_other_sizes_equal_eager_ddp(pool2: Any, name: str) -> None:
    found = pool2.run(complaints, name, "eager", True)
    told = [f"rank {rank}: {one}" for rank, ones in enumerate(found) for one in ones]
    assert not told, "\n".join(told)


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["lengths_far_apart", "graphs_with_train_masks"])
@pytest.mark.parametrize("strategy", [ws.ZeRO(stage=2), ws.FSDP()], ids=["zero2", "fsdp"])
def test_shards_with_other_sizes_equal_eager_ddp(pool2: Any, name: str, strategy: Any) -> None:
    """Parameters are cut, and batches are no less of other sizes on each rank."""
    found = pool2.run(of_shards, name, strategy)
    told = [f"rank {rank}: {one}" for rank, ones in enumerate(found) for one in ones]
    assert not told, "\n".join(told)
