"""Numbers of the user's own objects that a step itself moves, and what Python may do with them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.unit.capture.scalars import test_counters
from tests.unit.capture.scalars.test_counters import made, train
from wholestep.errors import CaptureError

HERE = Path(__file__).name
SEEN = 0
"""Of the steps below that count in a global."""


class Trainer:
    """Counts in every way that a class has."""

    def __init__(self) -> None:
        self.steps, self.rows, self.average, self.log, self.parts = 0, 0, 1.0, [0, 0.0], {"a": 0}

    def step(self, x: Tensor) -> Tensor:
        global SEEN
        SEEN += 1
        self.steps += 1
        self.rows += len(x)
        self.average = 0.9 * self.average + 0.1 * self.steps
        self.log[0] += 2
        self.log[1] += 0.25
        self.parts["a"] -= 1
        x = x * self.steps + self.average + self.log[1] * SEEN + self.parts["a"]
        return x * 2 if self.steps % 4 == 0 else x

    def held(self) -> Any:
        return SEEN, self.steps, self.rows, self.average, self.log, self.parts


def test_numbers_of_the_users_own_objects_go_on() -> None:
    global SEEN
    eager, ours = Trainer(), Trainer()
    step = ws.compile(ours.step, backend="eager")
    wanted = []
    for rows in (3, 3, 3, 3, 3, 2, 2, 3):
        wanted.append((eager.step(torch.ones(rows)), copy.deepcopy(eager.held())))
    SEEN = 0
    for (value, held), rows in zip(wanted, (3, 3, 3, 3, 3, 2, 2, 3), strict=True):
        assert torch.equal(step(torch.ones(rows)), value)
        assert ours.held() == held
    SEEN = 0
    assert step.cache_info().traces == 3  # every fourth call, and another shape


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * self.count


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * self.count


def closure() -> Any:
    count = 0

    def step(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x * count

    return step


@pytest.mark.parametrize("make", [Slotted, Module, closure])
def test_numbers_in_slots_modules_and_closures_go_on(make: Any) -> None:
    counts = make()
    step = ws.compile(lambda x: counts(x), backend="eager")
    assert [step(torch.ones(())).item() for _ in range(4)] == [1, 2, 3, 4]
    assert step.cache_info().traces == 1


def test_a_number_that_is_returned_is_that_of_the_call() -> None:
    held = Slotted()

    def step(x: Tensor) -> Any:
        held(x)
        return held.count, held.count / 2

    compiled = ws.compile(step, backend="eager")
    assert [compiled(torch.ones(())) for _ in range(3)] == [(1, 0.5), (2, 1.0), (3, 1.5)]


@pytest.mark.parametrize(
    "read",
    [
        lambda held, x: x[held.count],
        lambda held, x: x * len(range(held.count)),
        lambda held, x: x * {1: 2.0, 2: 3.0}[held.count],
        lambda held, x: x * float("0123"[held.count]),
    ],
    ids=["index", "range", "key", "text"],
)
def test_a_number_that_python_wants_to_know_is_refused_and_as_it_was(read: Callable[..., Any]) -> None:
    held = Slotted()

    def step(x: Tensor) -> Any:
        held(x)
        return read(held, x)

    with pytest.raises(CaptureError):
        ws.compile(step, backend="eager", fullgraph=True)(torch.ones(4))
    assert held.count == 0


def test_text_of_a_number_is_refused_where_it_is_made() -> None:
    held = Slotted()

    def step(x: Tensor) -> tuple[Tensor, str]:
        x = held(x)
        return x, f"call {held.count:05d}" if held.count % 2 == 0 else ""

    compiled = ws.compile(step, backend="eager", fullgraph=True)
    assert compiled(torch.ones(()))[0].item() == 1
    with pytest.raises(CaptureError, match=rf"makes text of a value .* at {HERE}:{step.__code__.co_firstlineno + 2}"):
        compiled(torch.ones(()))
    assert held.count == 1


@pytest.mark.parametrize("may_go_live", [True])
def test_text_of_a_number_is_that_of_eager_code_in_a_live_step(may_go_live: bool) -> None:
    held = Slotted()

    def step(x: Tensor) -> tuple[Tensor, str]:
        return held(x), f"call {held.count}"

    compiled = ws.compile(step, backend="eager")
    assert [compiled(torch.ones(()))[1] for _ in range(4)] == [f"call {number}" for number in (1, 2, 3, 4)]
    assert held.count == 4


def test_an_error_while_capturing_leaves_numbers_as_they_were() -> None:
    model, opt = made()
    held = Slotted()

    def step(x: Tensor) -> Tensor:
        train(model, opt, held(x))
        assert held.count < 2
        if x.sum() > 3:
            return x
        return x * 2

    with pytest.raises(CaptureError):
        ws.compile(step, backend="eager", fullgraph=True)(torch.ones(3, 4))
    assert (held.count, opt.calls, opt.param_groups[0]["step"], len(opt.state), opt.mode) == (0, 0, 0, 0, "fresh")


def test_a_number_that_no_box_holds_is_a_constant_of_its_trace() -> None:
    held = Slotted()
    held.count = 1 << 63
    step = ws.compile(lambda x: held(x), backend="eager")
    for _ in range(3):
        step(torch.ones(()))
    assert held.count == (1 << 63) + 3
    assert step.cache_info().traces == 3


def test_a_list_that_grows_next_to_a_counter_is_refused() -> None:
    held, log = Slotted(), []  # type: ignore[var-annotated]

    def step(x: Tensor) -> Tensor:
        x = held(x)
        log.append(1)
        return x

    with pytest.raises(CaptureError, match="The step changes Python state"):
        ws.compile(step, backend="eager", fullgraph=True)(torch.ones(()))
    assert (held.count, log) == (0, [])


UNARY = [
    "exp", "expm1", "log", "log2", "log10", "log1p", "sqrt", "sin", "cos", "tan", "atan", "sinh", "cosh", "tanh",
    "asinh", "erf", "gamma", "lgamma", "fabs", "degrees",
]  # fmt: skip
BINARY = ["pow", "atan2", "hypot", "fmod", "copysign"]


@pytest.mark.parametrize("name", [*UNARY, *BINARY])
def test_functions_of_math_take_rates_and_counters(name: str) -> None:
    """With the bits that Python gives, at every call."""
    opt = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.37)
    held, function = Slotted(), getattr(math, name)

    def step(x: Tensor) -> Any:
        held(x)
        first = opt.param_groups[0]["lr"]
        return getattr(math, name)(*((first, held.count / 3) if name in BINARY else (first + held.count,)))

    compiled = ws.compile(step, backend="eager")
    for call, rate in enumerate((0.37, 0.37, 1.91), 1):
        opt.param_groups[0]["lr"] = rate
        assert compiled(torch.ones(2)) == function(*((rate, call / 3) if name in BINARY else (rate + call,)))
    assert getattr(math, name) is function


def test_a_global_of_the_file_that_defines_the_optimizer_goes_on() -> None:
    """Names are put into that file's globals while the step is traced; what the step writes there stays visible."""
    model, opt = made()
    compiled = ws.compile(lambda x: test_counters.count_and_train(model, opt, x), backend="eager")
    before = test_counters.CALLS
    for call in (1, 2, 3):
        compiled(torch.ones(3, 4))
        assert before + call == test_counters.CALLS
    assert "min" not in vars(test_counters)
