"""Whether gathered parameters are kept, by predicted memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.unit.place.test_sharded import SHARDS, captured, collectives
from tests.unit.sharded_models import train
from wholestep.api import reshard_choice
from wholestep.api.reshard_choice import MEMORY_SHARE, decided, peak_bytes, place_and_choose
from wholestep.capture.capture import capture
from wholestep.config import Strategy
from wholestep.ir import node_meta
from wholestep.ir.node_meta import BucketKind
from wholestep.ir.program import Program
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
    assert ("again" in note_of(found)) == bool(again)


def note_of(program: Program) -> str:
    [note] = [note for record in program.history for note in record.notes if note.startswith("gathered parameters are")]
    return note


LAYERS = 8


@cache
def deep() -> Program:
    """A chain of layers whose activations take next to nothing beside their weights."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(LAYERS)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    program = capture(train, (model, opt, torch.randn(2, 64), torch.tensor([0, 1])), {}).program
    return shard_inputs(program, ws.FSDP(), (SHARDS,))


def chosen(limit_bytes: int) -> Program:
    with patch.object(reshard_choice, "device_bytes", lambda device: limit_bytes):
        return place_and_choose(deep(), ws.FSDP(), (SHARDS,), torch.device("cpu"), lambda question, answer: answer())


def kind(reshard: bool) -> Program:
    return place(deep(), ws.FSDP(reshard_after_forward=reshard), (SHARDS,))


def test_no_more_are_gathered_again_than_the_device_asks_for() -> None:
    most_bytes, least_bytes = peak_bytes(kind(reshard=False)), peak_bytes(kind(reshard=True))
    numbers = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        may_bytes = least_bytes + share * (most_bytes - least_bytes)
        found = chosen(math.ceil(may_bytes / MEMORY_SHARE))
        assert peak_bytes(found) <= may_bytes + 1
        numbers.append(collectives(found)["gather backward"])
        assert collectives(found)["gather"] + collectives(found)["gather forward"] == LAYERS
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[-1] == 0 < numbers[2] < numbers[0]


def test_those_that_the_forward_uses_first_are_gathered_again() -> None:
    most_bytes, least_bytes = peak_bytes(kind(reshard=False)), peak_bytes(kind(reshard=True))
    found = chosen(math.ceil((most_bytes + least_bytes) / 2 / MEMORY_SHARE))
    records = [one for one in map(node_meta.bucket, found.graph.nodes) if one is not None]
    again = {one.members[0] for one in records if one.phase == "backward"}
    kept = {one.members[0] for one in records if one.kind is BucketKind.GATHER and not one.phase}
    assert max(again) < min(kept)
    assert f"gathered again for the backward, {len(again) + 1} of {LAYERS}: kept, " in note_of(found)  # one needs none


def test_a_step_that_fits_in_no_way_gathers_all_again() -> None:
    assert collectives(chosen(1000)) == collectives(kind(reshard=True))


def test_the_bound_is_a_share_of_the_memory() -> None:
    least_bytes = -(-peak_bytes(kind(reshard=False)) * 10 // 8)
    for limit_bytes, is_kept in ((least_bytes, True), (least_bytes - 2, False)):
        assert (decided(lambda num: kind(reshard=num > 0), LAYERS, limit_bytes)[0] == 0) == is_kept


@pytest.mark.parametrize("strategy", [ws.FSDP(reshard_after_forward=True), ws.ZeRO(), ws.DDP()], ids=repr)
def test_nothing_is_asked_where_nothing_is_open(strategy: Strategy) -> None:
    asked: list[str] = []
    placed(strategy, 1000, asked)
    assert asked == []
    placed(ws.FSDP(), 1000, asked)
    assert len(asked) == 1
