"""What constructors read that run in a step: a change of it is seen like one of what the step itself reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws


class Settings:
    factor = 1.0


class Scaling:
    def __init__(self) -> None:
        self.factor, self.calls = Settings.factor, 0


class Derived(Scaling):
    def __init__(self) -> None:
        super().__init__()


class Allocated:
    factor: float

    def __new__(cls) -> Allocated:
        made = super().__new__(cls)
        made.factor = Settings.factor
        return made


@dataclass
class WithFactory:
    factors: list[float] = field(default_factory=lambda: [Settings.factor])

    @property
    def factor(self) -> float:
        return self.factors[0]


@dataclass
class AfterInit:
    factor: float = 0.0

    def __post_init__(self) -> None:
        self.factor = Settings.factor


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = Settings.factor


class ByClassMethod:
    def __init__(self, factor: float) -> None:
        self.factor = factor * Settings.factor

    @classmethod
    def usual(cls) -> ByClassMethod:
        return cls(1.0)


MAKERS: list[Callable[[], object]] = [
    Scaling, Derived, Allocated, WithFactory, AfterInit, Module, ByClassMethod.usual,
]  # fmt: skip


@pytest.mark.parametrize("make", MAKERS, ids=lambda one: one.__qualname__)
def test_a_step_makes_an_object_of_what_stands_there_now(
    make: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def scaled(x: Tensor) -> Tensor:
        made: object = make()
        return x * made.factor  # type: ignore[attr-defined]

    step, x = ws.compile(scaled, backend="eager", fullgraph=True), torch.ones(3)
    for factor in (1.0, 1.0, 3.0, 5.0, 1.0):
        monkeypatch.setattr(Settings, "factor", factor)
        assert torch.equal(step(x), x * factor)


def test_what_a_constructor_stores_may_move_elsewhere() -> None:
    other = Scaling()

    def scaled(x: Tensor) -> Tensor:
        return x * Scaling().factor * other.factor

    step, x = ws.compile(scaled, backend="eager", fullgraph=True), torch.ones(3)
    for number in range(3):
        other.calls = number
        step(x)
    assert step.cache_info().traces == 1
