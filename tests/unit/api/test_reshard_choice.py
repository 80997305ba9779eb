"""Whether gathered parameters are kept, by predicted memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch

import wholestep as ws
from tests.unit.place.test_sharded import SHARDS, captured, collectives
from tests.unit.sharded_models import train
from wholestep.api import reshard_choice
from wholestep.api.reshard_choice import decided, place_and_choose
from wholestep.config import Strategy
from wholestep.ir import node_meta
from wholestep.ir.program import Program
from wholestep.passes.analysis.task_graph import live_bytes
from wholestep.place.shard_inputs import shard_inputs
from wholestep.place.strategies import place


def placed(strategy: Strategy, limit_bytes: int | None, asked: list[str] | None = None) -> Program:
    def choose(question: str, answer: Callable[[], Any]) -> Any:
        if asked is not None:
            asked.append(question)
        return answer()

    program = shard_inputs(captured(train, "mlp", "sgd", 8), strategy, (SHARDS,))
    with patch.object(reshard_choice, "device_bytes", lambda device: limit_bytes):
        return place_and_choose(program, strategy, (SHARDS,), torch.device("cpu"), choose)


@pytest.mark.parametrize(("limit_bytes", "again"), [(None, 0), (1 << 30, 0), (1000, 2)])
def test_parameters_are_kept_where_there_is_memory(limit_bytes: int | None, again: int) -> None:
    found = placed(ws.FSDP(), limit_bytes)
    assert collectives(found)["gather backward"] == again
    [note] = [note for record in found.history for note in record.notes if note.startswith("gathered parameters are")]
    assert ("again" in note) == bool(again)


def test_the_bound_is_a_share_of_the_memory() -> None:
    strategy = ws.FSDP(reshard_after_forward=False)
    kept = place(shard_inputs(captured(train, "mlp", "sgd", 8), strategy, (SHARDS,)), strategy, (SHARDS,))
    peak_bytes = sum(map(node_meta.num_bytes, kept.placeholders)) + max(live_bytes(kept).values())
    least_bytes = -(-peak_bytes * 10 // 8)
    assert decided(kept, least_bytes)[0]
    assert not decided(kept, least_bytes - 2)[0]


@pytest.mark.parametrize("strategy", [ws.FSDP(reshard_after_forward=True), ws.ZeRO(), ws.DDP()], ids=repr)
def test_nothing_is_asked_where_nothing_is_open(strategy: Strategy) -> None:
    asked: list[str] = []
    placed(strategy, 1000, asked)
    assert asked == []
    placed(ws.FSDP(), 1000, asked)
    assert len(asked) == 1
