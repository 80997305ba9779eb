"""measure(): which calls are timed, and what is told of them."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.unit.capture.steps import train
from wholestep.api.report.records import MeasuredStep
from wholestep.errors import ConfigError
from wholestep.runtime.step_timer import StepTimer, StepTimes

CPU = torch.device("cpu")


def make() -> tuple[ws.CompiledStep, tuple[Any, ...]]:
    """A step, called once, and its arguments."""
    model, step = nn.Linear(4, 2), ws.compile(train)
    args = (model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(3, 4))
    step(*args)
    return step, args


def measured_of(step: ws.CompiledStep) -> MeasuredStep:
    measured = step.explain().measured
    assert measured is not None
    return measured


def test_the_next_calls_are_timed_behind_a_first_one() -> None:
    step, args = make()
    step.measure(2)
    for _ in range(3):
        assert step.explain().measured is None
        step(*args)
    measured = measured_of(step)
    assert measured.num_calls == 2
    assert 0 < measured.p10_us <= measured.step_us <= measured.p90_us
    assert measured.exposed_us == 0  # one rank waits for nobody
    step(*args)
    assert step.explain().measured == measured  # over


def test_it_can_be_asked_for_again() -> None:
    step, args = make()
    for calls in (1, 3):
        step.measure(calls)
        for _ in range(calls + 1):
            step(*args)
        assert measured_of(step).num_calls == calls


def test_what_cannot_be_measured() -> None:
    with pytest.raises(ConfigError, match="has not been called yet"):
        ws.compile(train).measure(2)
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        make()[0].measure(0)


def test_a_call_that_fails_does_not_count() -> None:
    meter = StepTimer(1, CPU, lambda wait: lambda inputs: ())

    def fails() -> None:
        raise ValueError

    meter.time(lambda: None)
    with pytest.raises(ValueError):  # noqa: PT011
        meter.time(fails)
    assert meter.measured is None
    meter.time(lambda: time.sleep(0.01))
    assert meter.measured is not None
    assert len(meter.measured.step_us) == 1
    assert meter.measured.step_us[0] >= 1e4


def test_a_wait_is_the_median_of_its_calls() -> None:
    measured = StepTimes(step_us=(9.0, 8.0, 7.0), waits_us=((1.0, 5.0), (2.0, 4.0), (9.0, 6.0)))
    assert [measured.wait_us(number) for number in range(2)] == [2.0, 5.0]
