"""Idioms that two processes train together under a strategy, compared with eager code on one.

Both ranks have the batches and random numbers of rank 0. So their Python goes one way, and the average of their
gradients is that of eager code.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch

import wholestep as ws
from benchmarks.idioms.base import IDIOMS, batches_of_rank_0
from benchmarks.idioms.compare import Outcome, outcome
from wholestep.config import Strategy
from wholestep.runtime.distributed.launch import Workers
from wholestep.runtime.distributed.world import close_current, enter

STRATEGIES: dict[str, Strategy] = {
    "ddp": ws.DDP(),
    "zero1": ws.ZeRO(),
    "zero2": ws.ZeRO(stage=2),
    "fsdp": ws.FSDP(),
    "fsdp_again": ws.FSDP(reshard_after_forward=True),
}
NPROC = 2
_TIMEOUT_S = 60.0


class Ranks:
    """Two processes, made anew after one has failed. They end with the ``with`` block."""

    def __init__(self) -> None:
        self._workers: Workers | None = None

    def call(self, task: Callable[..., Any], *args: Any) -> list[Any]:
        """What a function gives on each rank. Raises what a rank has raised, or RankMissingError."""
        self._workers = self._workers or Workers(NPROC, _begin, close_current)
        try:
            return self._workers.call(task, args, timeout_s=_TIMEOUT_S)
        except BaseException:
            self._workers.close(orderly=False)
            self._workers = None
            raise

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        if self._workers is not None:
            self._workers.close()


def _begin() -> None:
    torch.set_num_threads(1)
    logging.getLogger("wholestep").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", category=FutureWarning)  # of torch, at every module that is wrapped
    enter("gloo", _TIMEOUT_S)


def outcome_of_a_rank(name: str, strategy: str) -> Outcome:
    """What this rank finds; both call it. Equal means up to rounding: shards may add up in another order."""
    with batches_of_rank_0():
        return outcome(IDIOMS[name], strategy=STRATEGIES[strategy], rounds=True)


def outcome_under(ranks: Ranks, name: str, strategy: str) -> Outcome:
    """What came of an idiom on the rank that complains first, or on rank 0."""
    try:
        found: list[Outcome] = ranks.call(outcome_of_a_rank, name, strategy)
    except Exception as error:  # whatever a rank raised, or that one has gone
        told = f"{type(error).__name__}: {error}"
        return Outcome(name=name, kind="wrong", pieces=None, reason=told, complaints=(told,))
    return next((one for one in found if not one.holds), found[0])
