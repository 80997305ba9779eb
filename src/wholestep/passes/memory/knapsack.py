"""A 0/1 knapsack: the cheapest items that free enough bytes. Plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LIMIT = 400
"""Partial choices that are kept side by side. Up to as many, the choice is the best there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """What may be given up: the bytes that it frees, and the microseconds that it costs."""

    num_bytes: int
    us: float


@dataclass(frozen=True, slots=True)
class _Choice:
    num_bytes: int
    us: float
    last: int = -1
    rest: _Choice | None = None


def cheapest(items: Sequence[Item], need_bytes: int) -> tuple[int, ...]:
    """The items that free `need_bytes` in the least time; all if that is not enough.

    A choice that frees no more than another one and costs no less is dropped; what is left grows item by item
    (Nemhauser, Ullmann, "Discrete Dynamic Programming and Capital Allocation", 1969). Should more than `LIMIT` be left,
    those whose bytes differ by less than 1/`LIMIT` of the need count as alike: what is found then frees enough, and
    costs at most what the best choice for a need larger by ``len(items) / LIMIT`` of it does.
    """
    if sum(item.num_bytes for item in items) <= need_bytes:
        return tuple(range(len(items)))
    choices = [_Choice(0, 0.0)]
    for index, item in enumerate(items):
        with_it = [
            _Choice(min(one.num_bytes + item.num_bytes, need_bytes), one.us + item.us, index, one)
            for one in choices
            if one.num_bytes < need_bytes
        ]
        choices = _thinned(_undominated([*choices, *with_it]), need_bytes)
    best: _Choice | None = choices[-1]  # the only one that frees the whole need
    chosen: list[int] = []
    while best is not None and best.last >= 0:
        chosen.append(best.last)
        best = best.rest
    return tuple(reversed(chosen))


def _undominated(choices: list[_Choice]) -> list[_Choice]:
    """In the order of bytes, each one dearer than the one before it."""
    kept: list[_Choice] = []
    for one in sorted(choices, key=lambda one: (-one.num_bytes, one.us)):
        if not kept or one.us < kept[-1].us:
            kept.append(one)
    return kept[::-1]


def _thinned(choices: list[_Choice], need_bytes: int) -> list[_Choice]:
    """At most about `LIMIT`: of those with about equal bytes the cheapest, and always the last, without which what is
    still to come may not be enough."""
    if len(choices) <= LIMIT:
        return choices
    *others, last = choices
    cells = {one.num_bytes * LIMIT // need_bytes: one for one in reversed(others)}
    return [*reversed(cells.values()), last]
