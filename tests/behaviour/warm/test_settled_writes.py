"""What a step sets to the same value in every call, it sets again where its owner has set something else in between.

A trace sees no change where the value was there already. Each step runs twice, as two processes would that share the
cache of saved steps: the second one may find what the first one has kept.
"""

from __future__ import annotations

import types
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from benchmarks.random_programs import user_objects as user

CALLS, MOVED_BEFORE = 7, (4, 6)
OWN, OTHER = 1.0, 0.95


class OfTheClass:
    w: Any = OTHER


@dataclass(frozen=True)
class Frozen:
    w: float


def helper() -> None: ...


GLOBAL = OTHER
Write = Callable[[float], object]


def attribute_of(thing: Any) -> tuple[Write, Callable[[], object]]:
    def write(value: float) -> None:
        thing.w = value

    return write, lambda: thing.w


def by_name(thing: Any) -> tuple[Write, Callable[[], object]]:
    return lambda value: setattr(thing, "".join(["w"]), value), lambda: thing.w


def past_the_class_of(thing: Any) -> tuple[Write, Callable[[], object]]:
    return lambda value: object.__setattr__(thing, "w", value), lambda: thing.w


def in_the_dict_of(thing: Any) -> tuple[Write, Callable[[], object]]:
    return lambda value: vars(thing).__setitem__("w", value), lambda: thing.w


def item_of(container: Any, key: Any) -> tuple[Write, Callable[[], object]]:
    return lambda value: container.__setitem__(key, value), lambda: container[key]


def of_a_closure() -> tuple[Write, Callable[[], object]]:
    held = OTHER

    def write(value: float) -> None:
        nonlocal held
        held = value

    return write, lambda: held


def of_the_file() -> tuple[Write, Callable[[], object]]:
    def write(value: float) -> None:
        global GLOBAL
        GLOBAL = value

    return write, lambda: GLOBAL


def switch_of_torch() -> tuple[Write, Callable[[], object]]:
    def write(value: float) -> None:
        torch.backends.cudnn.benchmark = value == OTHER

    return write, lambda: torch.backends.cudnn.benchmark


PLACES: dict[str, Callable[[], tuple[Write, Callable[[], object]]]] = {
    "an object": lambda: attribute_of(user.Box(OTHER)),
    "slots": lambda: attribute_of(user.Slotted(OTHER)),
    "a property": lambda: attribute_of(user.Computed(OTHER)),
    "a dataclass": lambda: attribute_of(user.Record(OTHER)),
    "a class": lambda: attribute_of(OfTheClass),
    "a module": lambda: attribute_of(nn.Identity()),
    "a namespace": lambda: attribute_of(types.SimpleNamespace(w=OTHER)),
    "a function": lambda: attribute_of(helper),
    "a name that is made": lambda: by_name(user.Box(OTHER)),
    "a name past the class": lambda: past_the_class_of(user.Box(OTHER)),
    "a frozen dataclass": lambda: past_the_class_of(Frozen(OTHER)),
    "the dict of an object": lambda: in_the_dict_of(user.Box(OTHER)),
    "a dict": lambda: item_of({"w": OTHER}, "w"),
    "a defaultdict": lambda: item_of(defaultdict(float), "w"),
    "a list": lambda: item_of([OTHER], 0),
    "a deque": lambda: item_of(deque([OTHER]), 0),
    "an array": lambda: item_of(np.full(2, OTHER), 1),
    "a closure": of_a_closure,
    "a global": of_the_file,
    "a switch of torch": switch_of_torch,
}


def seen_behind_each_call(place: str, *, compiled: bool) -> list[tuple[object, float]]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    write, read = PLACES[place]()
    write(OTHER)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        write(OWN)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    run = ws.compile(step, backend="eager") if compiled else step
    seen = []
    for call in range(CALLS):
        if call in MOVED_BEFORE:
            write(OTHER)
        loss = float(run(torch.ones(2, 3)))
        seen.append((read(), loss))
    return seen


@pytest.fixture(autouse=True)
def switches_as_before() -> Any:
    before = torch.backends.cudnn.benchmark
    yield
    torch.backends.cudnn.benchmark = before


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize("place", PLACES)
def test_what_a_step_sets_it_sets_again(place: str, may_go_live: bool) -> None:
    want = seen_behind_each_call(place, compiled=False)
    for _ in range(2):
        assert seen_behind_each_call(place, compiled=True) == want
