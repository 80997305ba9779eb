"""Numbers that move between calls, as boxes and symbols, and what Python may do with them while a step is traced."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from wholestep.capture.scalars.varying_numbers import ScalarLocation, VaryingNumbers, scalar_location
from wholestep.errors import CaptureError, RetraceLimitError


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 1


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 1


def closure() -> Any:
    count = 1

    def step(x: Tensor) -> Tensor:
        return x * count

    def move(to: int) -> None:
        nonlocal count
        count = to

    return step, move


def held_by(make: Callable[[], Any]) -> Any:
    held = make()
    return lambda x: x * held.count, lambda to: setattr(held, "count", to)


@pytest.mark.parametrize("make", [lambda: held_by(Slotted), lambda: held_by(Module), closure])
def test_numbers_in_slots_modules_and_closures_are_read_at_every_call(make: Any) -> None:
    step, move = make()
    compiled = ws.compile(step, backend="eager", fullgraph=True)
    found = []
    for number in (1, 2, 3, 4):
        move(number)
        found.append(compiled(torch.ones(())).item())
    assert found == [1, 2, 3, 4]
    assert compiled.cache_info().traces == 2


def test_a_box_takes_its_number_over_and_says_what_is_none() -> None:
    held: dict[str, Any] = {"n": 3}
    numbers = VaryingNumbers([ScalarLocation(held, "n", "held.n", int)])
    held["n"] = 5
    assert numbers.why_not() is None
    assert numbers.numbers[0].box.item() == 5
    held["n"] = 0.5
    assert numbers.why_not() == "held.n was a int, is a float"
    del held["n"]
    assert numbers.why_not() == "held.n was a int, is not there"


@pytest.mark.parametrize(
    ("pair", "kind"), [((1, 2), int), ((1, 0.5), float), ((0.5, 1), float), ((1, True), None), ((1, "1"), None)]
)
def test_what_is_the_place_of_a_number(pair: Any, kind: type | None) -> None:
    found = scalar_location({}, "n", "held.n", pair)
    assert (None if found is None else found.kind) is kind


def test_a_number_that_the_step_moves_too_is_refused_and_as_it_was() -> None:
    held = Slotted()

    def step(x: Tensor) -> Tensor:
        x = x * held.count
        if held.count > 4:
            held.count += 1
        return x

    compiled = ws.compile(step, backend="eager", fullgraph=True)
    for held.count in (1, 2, 3):
        compiled(torch.ones(()))
    assert compiled.cache_info().traces == 2
    held.count = 5
    with pytest.raises(CaptureError, match=r"held\.count was 5, is 6 after one run"):
        compiled(torch.ones(()))
    assert held.count == 5


@pytest.mark.parametrize(
    "read",
    [
        lambda held, x: x[held.count],
        lambda held, x: x * len(range(held.count)),
        lambda held, x: x * {1: 2.0, 2: 3.0, 3: 1.0}[held.count],
        lambda held, x: x * float("0123"[held.count]),
        lambda held, x: (x, f"call {held.count:05d}"),
    ],
    ids=["index", "range", "key", "text", "format"],
)
def test_a_number_that_python_wants_to_know_is_a_constant_of_each_trace(read: Callable[..., Any]) -> None:
    held = Slotted()
    compiled = ws.compile(lambda x: read(held, x), backend="eager", fullgraph=True, max_retraces=2)
    for held.count in (1, 2, 3):
        found, wanted = compiled(torch.ones(4)), read(held, torch.ones(4))
        assert repr(found) == repr(wanted)
    held.count = 0
    with pytest.raises(RetraceLimitError, match="can be no input of the graph"):
        compiled(torch.ones(4))


UNARY = [
    "exp", "expm1", "log", "log2", "log10", "log1p", "sqrt", "sin", "cos", "tan", "atan", "sinh", "cosh", "tanh",
    "asinh", "erf", "gamma", "lgamma", "fabs", "degrees",
]  # fmt: skip
BINARY = ["pow", "atan2", "hypot", "fmod", "copysign"]


@pytest.mark.parametrize("name", [*UNARY, *BINARY])
def test_functions_of_math_take_rates_and_numbers(name: str) -> None:
    """With the bits that Python gives, at every call."""
    opt = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.37)
    held, function = Slotted(), getattr(math, name)

    def step(x: Tensor) -> Any:
        first = opt.param_groups[0]["lr"]
        return getattr(math, name)(*((first, held.count / 3) if name in BINARY else (first + held.count,)))

    compiled = ws.compile(step, backend="eager", fullgraph=True)
    for call, rate in enumerate((0.37, 0.37, 1.91), 1):
        opt.param_groups[0]["lr"], held.count = rate, call
        assert compiled(torch.ones(2)) == function(*((rate, call / 3) if name in BINARY else (rate + call,)))
    assert getattr(math, name) is function
