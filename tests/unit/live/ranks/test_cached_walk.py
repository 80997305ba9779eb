"""A walk through what a live step can reach is made again exactly where it may find something else."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from wholestep.capture.native import build
from wholestep.live.ranks.cached_walk import CachedWalk


class Training:
    """A model, and Python around it as a live step has it."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.opt, 1)
        self.losses: list[float] = []
        self.recent: deque[float] = deque(maxlen=3)
        self.meter = SimpleNamespace(count=0, name="")
        self.others: list[Any] = []
        self.by_name: dict[str, Any] = {}
        self.loose = torch.zeros(2)
        self.count = 0

    def step(self, x: torch.Tensor) -> Any:
        names = (self.losses, self.recent, self.meter.count, self.meter.name, self.others, self.by_name, self.loose)
        return self.model, self.opt, self.schedule, self.count, names, x


@pytest.fixture(params=["native", "python"])
def training(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Training:
    if request.param == "python":
        monkeypatch.setattr(build, "module", lambda: None)
    else:
        assert build.wait() == ""
    return Training()


def moves_numbers(t: Training) -> None:
    t.losses.append(1.0)
    t.recent.append(2.0)
    t.meter.count += 1
    t.meter.name = f"{t.count}"
    t.count += 1
    t.by_name["loss"] = 0.5 * t.count


def trains(t: Training) -> None:
    t.model(torch.ones(3, 2)).sum().backward()
    t.opt.step()
    t.schedule.step()
    t.opt.zero_grad(set_to_none=t.count % 2 == 0)
    t.count += 1


def gets_text(t: Training) -> None:
    t.meter.name = "epoch"
    t.losses.clear()


KEPT = [moves_numbers, trains, gets_text]


@pytest.mark.parametrize("change", KEPT, ids=lambda change: change.__name__)
def test_plain_values_need_no_other_walk(training: Training, change: Callable[[Training], None]) -> None:
    walk, x = CachedWalk(training.step), torch.ones(1)
    trains(training)
    first = walk.reached((x,), {})
    for _ in range(5):
        change(training)
        assert walk.reached((torch.ones(2),), {}) is first
    assert walk.walks == 1


def hook_to_a_module(t: Training) -> None:
    other = nn.Linear(2, 2)
    t.model[0].register_forward_hook(lambda *_: other)


def hook_of_a_gradient(t: Training) -> None:
    other = nn.Linear(2, 2)

    def hook(grad: torch.Tensor) -> torch.Tensor:
        return other(grad)

    next(t.model.parameters()).register_hook(hook)


def hook_of_the_optimizer(t: Training) -> None:
    other = nn.Linear(2, 2)

    def hook(*_: Any) -> None:
        other.weight.data.zero_()

    t.opt.register_step_pre_hook(hook)


CHANGES: list[Callable[[Training], Any]] = [
    lambda t: t.others.append(nn.Linear(2, 2)),
    lambda t: t.by_name.update(head=nn.Linear(2, 2)),
    lambda t: setattr(t.meter, "count", nn.Linear(2, 2)),
    lambda t: setattr(t.model[0], "weight", nn.Parameter(torch.zeros(2, 2))),
    lambda t: t.model.append(nn.Linear(2, 2)),
    lambda t: t.opt.add_param_group({"params": [nn.Parameter(torch.zeros(2))]}),
    lambda t: t.opt.param_groups[0]["params"].append(nn.Parameter(torch.zeros(2))),
    lambda t: t.loose.requires_grad_(),
    lambda t: setattr(t, "loose", nn.Parameter(torch.zeros(2))),
    hook_to_a_module,
    hook_of_a_gradient,
    hook_of_the_optimizer,
]


@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_what_leads_elsewhere_is_walked_again(training: Training, number: int) -> None:
    walk = CachedWalk(training.step)
    first = walk.reached((), {})
    num_params = len(first.state.params)
    moves_numbers(training)
    CHANGES[number](training)
    second = walk.reached((), {})
    assert walk.walks == 2
    assert len(second.state.params) > num_params or number == 3
    assert {id(slot.tensor) for slot in second.state.params} != {id(slot.tensor) for slot in first.state.params}


LATER: Any = None


def test_variables_that_come_later_are_walked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    head: nn.Module
    monkeypatch.delitem(globals(), "LATER")

    def step(way: int) -> Any:
        return LATER if way == 1 else head if way == 2 else None

    walk = CachedWalk(step)
    assert walk.reached((0,), {}).state.params == []
    monkeypatch.setitem(globals(), "LATER", nn.Linear(2, 2))
    assert len(walk.reached((0,), {}).state.params) == 2
    head = nn.Linear(2, 2)
    assert len(walk.reached((0,), {}).state.params) == 4


def test_other_arguments_are_walked_again(training: Training) -> None:
    walk = CachedWalk(training.step)
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    first = walk.reached((one, 1), {})
    assert walk.reached((one, 2), {}) is first
    for args, kwargs in (((two, 2), {}), ((two,), {}), ((), {"x": two})):
        walk.reached(args, kwargs)
    assert walk.walks == 4


def test_what_moves_at_every_call_is_not_kept_for_long(training: Training) -> None:
    walk = CachedWalk(training.step)
    kept = 0
    for _ in range(40):
        training.others[:] = [torch.zeros(1)]
        walk.reached((), {})
        kept += walk._kept is not None
    assert walk.walks == 40
    assert kept <= 6
