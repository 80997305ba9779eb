"""Version counters that a step reads, sets and keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.patterns.pattern import (
    Pattern,
    check,
    keep_version,
    refused,
    row,
    set_version,
)


class SetVersion(Pattern):
    def arguments(self, call: int) -> tuple[Any, ...]:
        w = torch.randn(16)
        for number in range((3, 0, 1, 2)[call]):
            w.fill_(number)
        self.w = w
        return w, torch.randn(16)

    def step(self, w: Tensor, x: Tensor) -> tuple[Tensor, int]:
        x = x.sin()
        version = w._version
        w.copy_(x + 1)
        set_version(w, version)
        return w, version

    def seen(self) -> dict[str, Any]:
        return {"version": self.w._version}


class SetVersionThenWrite(SetVersion):
    def step(self, w: Tensor, x: Tensor) -> tuple[Tensor, int]:
        w.mul_(2)
        version = w._version
        w.copy_(x + 1)
        set_version(w, version)
        w.add_(1)
        w.add_(1)
        return w * 1, version


class KeepVersion(SetVersion):
    def step(self, w: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        with keep_version(w):
            w.copy_(x.sin() + 1)
        return w


class SetVersionThenBackward(Pattern):
    def __init__(self) -> None:
        self.w = torch.randn(1, requires_grad=True)

    def arguments(self, call: int) -> tuple[Any, ...]:
        self.w.grad = None
        return (torch.randn(1),)

    def step(self, x: Tensor) -> Tensor:
        r = self.w.sin()
        with torch.no_grad():
            version = self.w._version
            self.w.copy_(x)
            set_version(self.w, version)
        r.backward()
        return r.detach()

    def seen(self) -> dict[str, Any]:
        return {"w": self.w, "grad": self.w.grad, "version": self.w._version}


class KeepVersionThenBackward(SetVersionThenBackward):
    def step(self, x: Tensor) -> Tensor:
        r = self.w.sin()
        with torch.no_grad(), keep_version(self.w):
            self.w.copy_(x)
        r.backward()
        return r.detach()


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(SetVersion, marks=row("unsafe_set_version_counter1")),
        pytest.param(SetVersionThenWrite, marks=row("unsafe_set_version_counter1")),
        pytest.param(KeepVersion, marks=row("unsafe_preserve_version_counter1")),
    ],
)
@torch.no_grad()
def test_a_version_counter_is_that_of_eager_code(kind: type[Pattern]) -> None:
    check(kind)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(SetVersionThenBackward, marks=row("unsafe_set_version_counter2")),
        pytest.param(KeepVersionThenBackward, marks=row("unsafe_preserve_version_counter2")),
    ],
)
def test_a_backward_does_not_see_a_write_with_its_version_set_back(kind: type[Pattern]) -> None:
    check(kind)


@row("unsafe_preserve_version_counter2")
def test_backward_still_refuses_what_was_overwritten() -> None:
    w = torch.randn(1, requires_grad=True)

    def step(x: Tensor) -> None:
        r = w.sin()
        with torch.no_grad():
            w.copy_(x)
        r.backward()

    refused(step, torch.randn(1), text="modified by an inplace operation")


@row("unsafe_set_version_counter1")
@torch.no_grad()
def test_version_counters_that_python_looks_at_are_refused() -> None:
    refused(lambda w: w * 2 if w._version else w, torch.randn(3), text="decides what Python does")
    refused(lambda w: set_version(w, 5), torch.randn(3), text="sets the version counter of a tensor")
    refused(lambda w: w.detach()._version, torch.randn(3), text="version counter of a view")
