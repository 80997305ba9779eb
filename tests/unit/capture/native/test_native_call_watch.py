"""Natively, Python is asked once about each C function that it allows, and every time about any other one."""

from __future__ import annotations

import cProfile
import math
import pstats
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, ModuleType
from typing import Any

import pytest

from wholestep.capture.native import build


@pytest.fixture
def module() -> ModuleType:
    assert build.wait() == ""
    found = build.module()
    assert found is not None
    return found


ASKED, TOLD = 1, 2


@contextmanager
def watched(
    module: ModuleType,
    ask: Callable[[FrameType, Any], Any],
    look: Callable[[CodeType], int] = lambda code: ASKED,
    enter: Callable[[FrameType], Any] = lambda frame: None,
) -> Iterator[None]:
    module.watch_calls(look, ask, enter)
    try:
        yield
    finally:
        module.unwatch_calls()


def test_an_allowed_function_is_asked_about_once(module: ModuleType) -> None:
    asked: list[Any] = []
    with watched(module, lambda frame, function: asked.append(function) is None):
        for _ in range(3):
            math.nextafter(1.0, 2.0)
    assert asked.count(math.nextafter) <= 1  # an earlier trace may have allowed it
    with watched(module, lambda frame, function: asked.append(function) is None):
        math.nextafter(1.0, 2.0)
    assert asked.count(math.nextafter) <= 1


def test_any_other_one_is_asked_about_every_time_and_may_be_refused(module: ModuleType) -> None:
    asked: list[Any] = []
    with watched(module, lambda frame, function: asked.append((frame.f_code.co_name, function)) is not None):
        time.perf_counter_ns()
        time.perf_counter_ns()
    here = sys._getframe().f_code.co_name
    assert asked[:2] == [(here, time.perf_counter_ns)] * 2

    def refuse(frame: FrameType, function: Any) -> bool:
        if function is time.perf_counter_ns:
            raise ValueError("refused")
        return False

    with pytest.raises(ValueError, match="refused"), watched(module, refuse):
        time.perf_counter_ns()


def test_a_code_is_looked_at_once_and_one_of_no_interest_is_not_asked_about(module: ModuleType) -> None:
    looked: list[str] = []
    asked: list[str] = []

    def look(code: CodeType) -> int:
        looked.append(code.co_name)
        return 0 if code.co_name == "quiet" else ASKED

    def quiet() -> None:
        time.perf_counter_ns()

    def loud() -> None:
        time.perf_counter_ns()

    with watched(module, lambda frame, function: asked.append(frame.f_code.co_name) is not None, look):
        for one in (quiet, loud, quiet, loud):
            one()
    assert asked.count("loud") == 2
    assert "quiet" not in asked
    assert looked.count("quiet") == looked.count("loud") == 1


def test_code_is_told_of_where_code_of_interest_enters_it(module: ModuleType) -> None:
    told: list[str] = []
    kinds = {"inner": ASKED | TOLD, "outer": ASKED, "others": 0}

    def inner() -> None: ...

    def outer() -> None:
        inner()

    def others() -> None:
        inner()

    def enter(frame: FrameType) -> None:
        told.append(f"{frame.f_back.f_code.co_name if frame.f_back else ''} {frame.f_code.co_name}")

    with watched(module, lambda frame, function: True, lambda code: kinds.get(code.co_name, 0), enter):
        outer()
        others()
    assert told == ["outer inner"]


def test_what_is_raised_where_code_is_looked_at_or_entered_ends_the_call(module: ModuleType) -> None:
    def fails(one: CodeType | FrameType) -> int:
        code = one if isinstance(one, CodeType) else one.f_code
        if code.co_name == "inner":
            raise ValueError("refused")
        return ASKED

    def inner() -> None: ...

    with pytest.raises(ValueError, match="refused"), watched(module, lambda *call: True, fails):
        inner()
    with pytest.raises(ValueError, match="refused"), watched(module, lambda *call: True, lambda code: 3, fails):
        inner()
    with pytest.raises(TypeError):
        module.watch_calls(fails)


def test_a_profiler_that_runs_goes_on(module: ModuleType) -> None:
    """One of Python, and one of C as cProfile is on Python 3.11."""
    seen: list[Any] = []
    sys.setprofile(lambda frame, event, function: seen.append(function))
    around = sys.getprofile()
    try:
        with watched(module, lambda frame, function: False):
            time.perf_counter_ns()
        assert sys.getprofile() is around
    finally:
        sys.setprofile(None)
    assert time.perf_counter_ns in seen
    profile = cProfile.Profile()
    with profile, watched(module, lambda frame, function: False):
        time.perf_counter_ns()
    counts = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    assert any("perf_counter_ns" in name for _, _, name in counts)
