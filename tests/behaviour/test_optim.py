"""Every optimizer with a fixed update rule and every scheduler against plain eager code on one process."""

from __future__ import annotations

import inspect

import pytest
import torch

import wholestep as ws
from tests.behaviour.cases import OPTIM_CASES
from tests.behaviour.cases.optimizers import OPTIMIZERS, SCHEDULES
from tests.behaviour.harness import Run, check

REFUSED = {torch.optim.LBFGS, torch.optim.SparseAdam}
NO_RULE = {torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler._LRScheduler}


@pytest.mark.parametrize("name", OPTIM_CASES)
def test_equals_eager(name: str) -> None:
    complaints = check(OPTIM_CASES[name], Run())
    assert not complaints, "\n".join(complaints)


def test_no_optimizer_of_torch_is_forgotten() -> None:
    offered = {one for one in vars(torch.optim).values() if inspect.isclass(one)} - {torch.optim.Optimizer}
    assert {one for one in offered if issubclass(one, torch.optim.Optimizer)} == REFUSED | {
        make for make, _, _ in OPTIMIZERS.values()
    }


def test_no_scheduler_of_torch_is_forgotten() -> None:
    offered = {
        one
        for one in vars(torch.optim.lr_scheduler).values()
        if inspect.isclass(one) and issubclass(one, torch.optim.lr_scheduler.LRScheduler)
    }
    # SWALR belongs to weight averaging and lives in another module.
    assert len(offered - NO_RULE) == len(SCHEDULES)


def test_an_optimizer_that_does_not_step_gets_no_state() -> None:
    """Its parameter is updated by another one."""
    model = torch.nn.Linear(3, 2)
    rests, steps = torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(which: dict[str, torch.optim.Optimizer], x: torch.Tensor) -> None:
        model(x).sum().backward()
        which["steps"].step()
        which["steps"].zero_grad()

    ws.compile(step, backend="eager")({"rests": rests, "steps": steps}, torch.ones(1, 3))
    assert not rests.state
    assert len(steps.state) == 2
