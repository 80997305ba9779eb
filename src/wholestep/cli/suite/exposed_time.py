"""Exposed communication and idle time of a device: arithmetic on intervals.

An interval is ``(start, stop)`` in microseconds; those that overlap count once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as intervals in order that neither meet nor are empty."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if stop <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def total_us(intervals: Iterable[Interval]) -> float:
    """Microseconds in which at least one of `intervals` is."""
    return sum(stop - start for start, stop in union(intervals))


def exposed_us(communication: Sequence[Interval], rest: Sequence[Interval]) -> float:
    """Microseconds in which one of `communication` is and none of `rest`."""
    return total_us([*communication, *rest]) - total_us(rest)


def idle_us(intervals: Sequence[Interval]) -> float:
    """Microseconds between the first start and the last stop in which nothing runs."""
    merged = union(intervals)
    return merged[-1][1] - merged[0][0] - total_us(merged) if merged else 0.0
