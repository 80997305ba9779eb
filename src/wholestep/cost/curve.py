"""Microseconds as a function of an amount (bytes, FLOPs, elements), from a few measured points."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from wholestep.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Between two points logarithms are interpolated; below the first one its time is the floor; beyond the last one
    the time grows with the slope that leads to it.

    Never falls as the amount grows. The slope is taken over a factor of 8 at least where there is one, as the last two
    points may differ by noise alone. A slope wants two points: one would leave proportion, which takes latency for
    work.
    """

    points: tuple[tuple[float, float], ...]
    """(amount, us), amounts rising, times never falling, all positive and finite. At least two."""

    def __post_init__(self) -> None:
        numbers = [number for point in self.points for number in point]
        if len(self.points) < 2 or not all(math.isfinite(number) and number > 0 for number in numbers):
            raise ConfigError(
                f"A curve wants at least two points (amount, us) of positive finite numbers, got {self.points!r}."
            )
        if any(a >= b or s > t for (a, s), (b, t) in pairwise(self.points)):
            raise ConfigError(f"A curve wants amounts that rise and times that never fall, got {self.points!r}.")

    @property
    def floor_us(self) -> float:
        """What the smallest amount costs."""
        return self.points[0][1]

    def us(self, amount: float) -> float:
        """The time of `amount`."""
        amounts = [point[0] for point in self.points]
        index = bisect_right(amounts, amount)
        if index == 0:
            return self.floor_us
        a, s = self.points[index - 1]
        if index < len(self.points):
            b, t = self.points[index]
            return s * math.pow(t / s, math.log(amount / a) / math.log(b / a))
        before, was = self.points[max(0, bisect_right(amounts, a / 8) - 1)]
        return s + (amount - a) * (s - was) / (a - before)

    def less(self, us: float) -> Curve:
        """The curve of what is left when a part of `us` that every call pays is counted elsewhere."""
        least = 1e-3  # a nanosecond: a curve holds positive times
        return Curve(points=tuple((amount, max(least, time - us)) for amount, time in self.points))


def fitted(measured: Iterable[tuple[float, float]]) -> Curve:
    """The curve through measurements (amount, us), which come in any order and with noise.

    Neighbours that contradict the rule that more work takes longer share the mean of their times.
    Source: Ayer et al., "An empirical distribution function for sampling with incomplete information", 1955.
    """
    groups: list[list[tuple[float, float]]] = []
    for amount, us in sorted(measured):
        groups.append([(float(amount), float(us))])
        while len(groups) > 1 and _mean_us(groups[-2]) >= _mean_us(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    return Curve(points=tuple((amount, _mean_us(group)) for group in groups for amount, _ in group))


def _mean_us(group: Sequence[tuple[float, float]]) -> float:
    return fmean(us for _, us in group)


def straight(*, floor_us: float, per_us: float, smallest: float = 1e3, largest: float = 1e12) -> Curve:
    """The curve of a floor and a rate: ``floor_us + amount / per_us``."""
    steps = int(math.log2(largest / smallest)) + 1
    amounts = [smallest * 2.0**step for step in range(steps + 1)]
    return Curve(points=tuple((amount, floor_us + amount / per_us) for amount in amounts))
