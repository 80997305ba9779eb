"""What anybody sets on an object, whoever wrote its class, is read again: set, moved, deleted, set once more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import wholestep as ws
from wholestep.capture.native import build

DATA = TensorDataset(torch.ones(3))
Change = Callable[[Any], object]


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)


class OfTheUser:
    pass


class OfTheUserAndTorch(torch.Tensor):
    pass


def function() -> None: ...


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Triples(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * x


class Two:
    value = 2.0


class Three:
    value = 3.0


THINGS: dict[str, Callable[[], Any]] = {
    "optimizer": optimizer,
    "scheduler": lambda: torch.optim.lr_scheduler.StepLR(optimizer(), 5),
    "scaler": lambda: torch.amp.GradScaler("cpu"),
    "parameter": lambda: nn.Parameter(torch.ones(1)),
    "tensor": lambda: torch.ones(2),
    "tensor of a class of the user's": lambda: torch.ones(2).as_subclass(OfTheUserAndTorch),
    "module": lambda: nn.Linear(1, 1),
    "distribution": lambda: torch.distributions.Normal(0.0, 1.0),
    "data": lambda: DATA,
    "loader": lambda: DataLoader(DATA),
    "polynomial of numpy": lambda: np.poly1d([1.0]),
    "function": lambda: function,
    "object": OfTheUser,
    "class": lambda: OfTheUser,
}


def setting(value: float) -> Change:
    return lambda thing: setattr(thing, "own", value)


def deleting(thing: Any) -> None:
    del thing.own


def assert_never_stale(thing: Any, read: Callable[[Any], Any], changes: list[Change]) -> None:
    def step(x: Tensor) -> Tensor:
        return x * read(thing)

    compiled, x = ws.compile(step, backend="eager"), torch.ones(2)
    compiled(x)
    for change in changes:
        change(thing)
        for _ in range(2):
            assert torch.equal(compiled(x), step(x))


@pytest.mark.parametrize("name", THINGS)
def test_what_is_set_on_an_object_is_read_again(name: str) -> None:
    changes = [setting(2.0), setting(3.0), deleting, setting(5.0), deleting]
    assert_never_stale(THINGS[name](), lambda thing: getattr(thing, "own", 1.0), changes)


def test_a_parameter_that_is_told_apart_later() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def weights(net: nn.Module) -> Any:
        return sum(param.detach().sum() for param in net.parameters() if not hasattr(param, "left_out"))

    def leave_out(net: Any) -> None:
        net[1].bias.left_out = True

    assert_never_stale(model, weights, [leave_out])


@pytest.mark.parametrize(
    ("read", "changes"),
    [
        (lambda opt: opt.defaults.get("own", 1.0), [lambda opt: opt.defaults.update(own=2.0)]),
        (
            lambda opt: opt.state[opt.param_groups[0]["params"][0]].get("own", 1.0),
            [
                lambda opt: opt.state[opt.param_groups[0]["params"][0]].update(own=2.0),
                lambda opt: opt.state[opt.param_groups[0]["params"][0]].update(own=3.0),
            ],
        ),
        (lambda opt: opt.param_groups[0].get("own", 1.0), [lambda opt: opt.param_groups[0].update(own=2.0)]),
    ],
    ids=["defaults", "state", "group"],
)
def test_what_an_optimizer_holds_for_the_user(read: Callable[[Any], Any], changes: list[Change]) -> None:
    assert_never_stale(optimizer(), read, changes)


def test_what_a_schedule_was_made_with() -> None:
    schedule = torch.optim.lr_scheduler.StepLR(optimizer(), 5)
    changes: list[Change] = [lambda one: setattr(one, "gamma", 0.7), lambda one: one.base_lrs.__setitem__(0, 0.3)]
    assert_never_stale(schedule, lambda one: one.gamma * one.base_lrs[0], changes)


@pytest.mark.parametrize("native", ["1", "0"])
@pytest.mark.parametrize(
    ("make", "read", "change"),
    [
        (Two, lambda one: one.value, lambda one: setattr(one, "__class__", Three)),
        (Two, lambda one: one.value, lambda one: setattr(one, "__dict__", {"value": 4.0})),
        (Doubles, lambda net: net(torch.ones(())), lambda net: setattr(net, "__class__", Triples)),
    ],
    ids=["class", "dict", "class of a module"],
)
def test_an_object_that_becomes_another(
    make: Any, read: Any, change: Change, native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native == "0":
        monkeypatch.setattr(build, "module", lambda: None)
    assert_never_stale(make(), read, [change])
