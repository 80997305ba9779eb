"""Tensors that are arguments of a step, and that objects hold as well: ``trainer.batch = x`` before ``step(x)``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.harness.training import backward_and_step

NUM_CALLS = 5


class Trainer:
    """Keeps what it works on."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 3)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.batch = torch.zeros(2, 3)
        self.weight = torch.ones(3)
        self.adds = False

    def unread(self, x: Tensor) -> Tensor:
        if self.adds:
            x = x + self.batch
        return backward_and_step(self.model(x).square().mean(), self.opt)

    def read(self, x: Tensor) -> Tensor:
        return backward_and_step((self.model(x) * self.batch).square().mean(), self.opt)

    def written(self, x: Tensor) -> Tensor:
        self.batch.mul_(2)
        return backward_and_step(self.model(x).square().mean(), self.opt)

    def weighted(self, x: Tensor, weight: Tensor) -> Tensor:
        return backward_and_step((self.model(x) * weight * self.weight).square().mean(), self.opt)


def losses(trainer: Trainer, step: Callable[[Tensor], Tensor]) -> list[float]:
    torch.manual_seed(1)
    found = []
    for _ in range(NUM_CALLS):
        trainer.batch = torch.randn(2, 3)
        found.append(step(trainer.batch).item())
    return found


def test_an_argument_that_is_not_read_where_it_is_held_is_data() -> None:
    eager, trainer = Trainer(), Trainer()
    step = ws.compile(trainer.unread, backend="eager", fullgraph=True)
    assert losses(trainer, step) == losses(eager, eager.unread)
    assert (step.cache_info().traces, step.cache_info().hits) == (1, NUM_CALLS - 1)


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize("name", ["read", "written"])
def test_one_that_is_read_there_is_compared(name: str, may_go_live: bool) -> None:
    eager, trainer, strict = Trainer(), Trainer(), Trainer()
    step = ws.compile(getattr(trainer, name), backend="eager")
    assert losses(trainer, step) == losses(eager, getattr(eager, name))
    with pytest.raises(ws.CaptureError, match="is another tensor in every call"):
        losses(strict, ws.compile(getattr(strict, name), backend="eager", fullgraph=True))


def test_what_an_object_holds_is_no_argument_of_a_later_call() -> None:
    """The first call gives what the object holds, and reads it there as well; later calls give others."""

    def run(compiled: bool) -> list[float]:
        trainer = Trainer()
        step: Any = ws.compile(trainer.weighted, backend="eager", fullgraph=True) if compiled else trainer.weighted
        weights = [trainer.weight, torch.full((3,), 0.5), torch.full((3,), 0.25), trainer.weight]
        return [step(torch.ones(2, 3), weight).item() for weight in weights]

    assert run(compiled=True) == run(compiled=False)


def test_one_in_a_variable_is_state() -> None:
    """Nobody tells whether a variable was read."""

    def run(compiled: bool) -> list[float]:
        trainer, scale = Trainer(), torch.full((3,), 2.0)

        def step(x: Tensor, weight: Tensor) -> Tensor:
            return backward_and_step((trainer.model(x) * weight * scale).square().mean(), trainer.opt)

        run_step: Any = ws.compile(step, backend="eager", fullgraph=True) if compiled else step
        return [run_step(torch.ones(2, 3), weight).item() for weight in (scale, torch.ones(3), scale, torch.ones(3))]

    assert run(compiled=True) == run(compiled=False)


def test_a_step_that_reads_one_in_two_places_is_not_saved(tmp_path: Path) -> None:
    trainer = Trainer()
    step = ws.compile(trainer.read, backend="eager", fullgraph=True)
    trainer.batch = x = torch.ones(2, 3)
    step(x)
    with pytest.raises(ws.ArtifactError, match="a tensor of its arguments where an object holds it"):
        step.save(tmp_path / "step")
