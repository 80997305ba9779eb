"""Natively, Python is asked once about each C function that it allows, and every time about any other one."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

import pytest

from wholestep.capture.native import build


@pytest.fixture
def module() -> ModuleType:
    assert build.wait() == ""
    found = build.module()
    assert found is not None
    return found


@contextmanager
def watched(module: ModuleType, ask: Callable[[FrameType, Any], Any]) -> Iterator[None]:
    module.watch_calls(ask)
    try:
        yield
    finally:
        sys.setprofile(None)


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
