"""Tensors of the graph that mirror what stands in places of the user's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.harness.training import backward_and_step
from wholestep.capture.effects.object_effects import ObjectEffects
from wholestep.capture.effects.tensor_effects import Mirror, MirrorMode


def mirror(way: MirrorMode) -> tuple[Mirror, dict[str, Tensor]]:
    place = {"mean": torch.ones(3)}
    return Mirror(torch.zeros(3), (place, "mean"), way), place


@pytest.mark.parametrize("way", MirrorMode)
def test_a_call_begins_with_what_stands_there(way):
    made, place = mirror(way)
    made.take()
    assert torch.equal(made.tensor, torch.ones(3))
    made.give()
    place["mean"] = torch.full((3,), 5.0)
    made.take()
    assert torch.equal(made.tensor, place["mean"])
    made.give()
    place["mean"].add_(1)
    made.take()
    assert torch.equal(made.tensor, place["mean"])


def test_what_a_failed_call_has_written_is_forgotten():
    made, place = mirror(MirrorMode.REPLACES)
    made.take()
    made.give()
    for _ in range(2):
        made.take()
        assert torch.equal(made.tensor, torch.ones(3))
        made.tensor.fill_(7.0)  # and here the call fails
    assert torch.equal(place["mean"], torch.ones(3))


def test_nothing_is_copied_where_nobody_has_touched_it():
    for way in (MirrorMode.READS, MirrorMode.REPLACES):
        made, _ = mirror(way)
        made.take()
        made.give()
        version = made.tensor._version
        made.take()
        assert made.tensor._version == version


def test_a_place_holds_a_new_tensor_after_a_call_that_replaces_it():
    for way, is_new in ((MirrorMode.READS, False), (MirrorMode.WRITES, False), (MirrorMode.REPLACES, True)):
        made, place = mirror(way)
        before = place["mean"]
        made.take()
        made.tensor.fill_(4.0)
        made.give()
        assert (place["mean"] is not before) == is_new
        assert place["mean"] is not made.tensor
        assert float(place["mean"][0]) == (1.0 if way is MirrorMode.READS else 4.0)


@pytest.mark.parametrize("inference", [True, False])
def test_a_mirror_works_in_inference_mode_and_outside(inference):
    with torch.inference_mode(inference):
        made, place = mirror(MirrorMode.REPLACES)
        for number in range(3):
            made.take()
            assert torch.equal(made.tensor, place["mean"])
            made.tensor.add_(1.0)
            made.give()
            assert float(place["mean"][0]) == 2.0 + number


class Trainer:
    def __init__(self) -> None:
        self.model, self.mean = nn.Linear(2, 1), torch.zeros(())
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, x: Tensor) -> tuple[Tensor, Tensor]:
        loss = self.model(x).square().mean()
        backward_and_step(loss, self.opt)
        before, self.mean = self.mean, 0.5 * self.mean + loss.detach()
        return self.mean, before


def test_a_result_is_the_tensor_that_the_step_has_left():
    trainer = Trainer()
    step = ws.compile(trainer.step, backend="eager")
    for _ in range(3):
        kept = trainer.mean
        mean, before = step(torch.ones(4, 2))
        assert mean is trainer.mean
        assert torch.equal(before, kept)
        assert mean is not kept


def test_nobody_hides_what_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where something stood before, one trace more cannot look at it. `hidden` has an item for each look."""
    hidden: list[bool] = []
    original = ObjectEffects.__init__

    def noted(self: ObjectEffects, *args: Any) -> None:
        original(self, *args)
        hidden.append(self.hides)

    monkeypatch.setattr(ObjectEffects, "__init__", noted)
    held = {"logs": None}

    @ws.compile(backend="eager")
    def step(x: Tensor) -> None:
        held["logs"] = {"sum": x.sum()}  # type: ignore[assignment]

    step(torch.ones(2))
    first = len(hidden)
    step(torch.ones(2))
    assert hidden == [False] * 2 * first + [True]
    step(torch.ones(2))
    assert len(hidden) == 2 * first + 1
