"""Which gradients share a bucket: algorithms on bytes and microseconds, without graphs.

Note: the two rules
    With a bound given by the user the assignment is that of DistributedDataParallel: a bucket takes gradients in the
    order in which they become ready until it holds at least as many bytes as its limit.
    With costs given, buckets are cut so that the predicted step is shortest. Communication of bucket k starts when its
    last gradient is ready and the link is free; what follows it on the device is the update of its parameters. Over all
    ways to cut, dynamic programming keeps those that are not worse in both the time at which the link is free and the
    time at which the step could end. Its result competes with the fixed rule and with one bucket in a simulation,
    so it is never predicted to be slower than either.
    The idea of merging by measured latency and readiness: Shi et al., "MG-WFBP: Efficient Data Communication for
    Distributed Synchronous SGD", 2019.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from wholestep.cost.timeline import ALONE, Clock, Sharing, Task

MAX_UNITS = 192
"""Cuts are looked for between at most this many runs of gradients: the search is quadratic."""

PRICES = (0.001, 0.1, 0.3, 1.0, 3.0)
"""What communication costs where it is hidden, as shares of its time, that are tried: it slows computation down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Items that share a bucket, by index in rising order, their bytes, and why no more of them do."""

    items: tuple[int, ...]
    num_bytes: int
    reason: str


FULL = "full: it holds as many bytes as were asked for"
DEPENDS = "closed: the next gradient depends on the reduction of one in here"
END = "end: no gradient of this type is left"

Cuts = dict[int, str]
"""Items behind which a bucket is closed, each with the reason."""


def pack(
    sizes_bytes: Sequence[int],
    keys: Sequence[Hashable],
    cuts: Cuts,
    *,
    needs: Sequence[frozenset[int]] = (),
) -> list[Group]:
    """Puts items into groups, in order; an item joins the open group of its key or opens the next one.

    A group has items of one key and ends behind an item in `cuts`. `needs[i]` are the items that must be done before
    item i can start. Nothing in a group needs the group itself, also not by way of other groups, so the groups can be
    done one after another. Groups come in the order in which they are opened.
    """
    groups: list[list[int]] = []
    reasons: list[str] = []
    opened: dict[Hashable, int] = {}
    group_of: list[int] = []
    behind: list[set[int]] = []  # the groups that each group needs, directly or by way of others
    for item, key in enumerate(keys):
        wanted = {group_of[other] for other in needs[item]} if needs else set()
        wanted = wanted.union(*(behind[group] for group in wanted))
        current = opened.get(key)
        if current is not None and current in wanted:
            reasons[current], current = DEPENDS, None
        if current is None:
            current = opened[key] = len(groups)
            groups.append([])
            reasons.append(END)
            behind.append(set())
        groups[current].append(item)
        group_of.append(current)
        behind[current] |= wanted
        for other in behind:
            if current in other:
                other |= behind[current]
        if item in cuts:
            reasons[current] = cuts[item]
            del opened[key]
    return [
        Group(items=tuple(items), num_bytes=sum(sizes_bytes[item] for item in items), reason=reason)
        for items, reason in zip(groups, reasons, strict=True)
    ]


def fixed_cuts(sizes_bytes: Sequence[int], keys: Sequence[Hashable], limits_bytes: Sequence[int]) -> Cuts:
    """The cuts of DistributedDataParallel: a bucket is closed once it holds at least its limit.

    `limits_bytes`: of the first, second, ... bucket of each key; the last one holds for all further ones.
    """
    totals: dict[Hashable, int] = {}
    closed: dict[Hashable, int] = {}
    cuts: Cuts = {}
    for item, (size, key) in enumerate(zip(sizes_bytes, keys, strict=True)):
        totals[key] = totals.get(key, 0) + size
        if totals[key] >= limits_bytes[min(closed.get(key, 0), len(limits_bytes) - 1)]:
            cuts[item] = FULL
            totals[key], closed[key] = 0, closed.get(key, 0) + 1
    return cuts


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What is known about the reductions of a step: times in microseconds, one entry per item."""

    ready_us: Sequence[float]
    """When the gradient exists, in rising order, if nothing is waited for."""
    update_us: Sequence[float]
    """What runs on the device once it has arrived: the update of its parameter."""
    end_us: float
    """When the device has done all that needs no communication, updates not counted."""
    comm_us: Callable[[int], float]
    """Time of one reduction of so many bytes."""
    launch_us: float = 0.0
    """What starting one costs the computation."""
    sharing: Sharing = ALONE
    """How much longer computation and reductions take beside each other."""
    barrier: bool = False
    """Whether every update waits for all reductions (a norm over all gradients)."""


def planned_cuts(
    sizes_bytes: Sequence[int],
    keys: Sequence[Hashable],
    costs: Costs,
    *,
    cap_bytes: int,
    others: Sequence[Cuts] = (),
    needs: Sequence[frozenset[int]] = (),
) -> Cuts:
    """The cuts with the shortest predicted step; on a tie those with fewer buckets.

    Args:
        cap_bytes: bound of the bytes of a bucket of several gradients, since a bucket is memory on top of them.
        others: assignments that the found one has to beat, if they keep the bound.
    """

    def predicted(cuts: Cuts) -> tuple[float, int]:
        groups = pack(sizes_bytes, keys, cuts, needs=needs)
        if any(group.num_bytes > cap_bytes and len(group.items) > 1 for group in groups):
            return math.inf, len(groups)
        return round(predict_us(groups, costs), 3), len(groups)

    candidates = list(others)
    for price in PRICES:
        found: Cuts = {}
        for key in dict.fromkeys(keys):
            items = [item for item, other in enumerate(keys) if other == key]
            found.update(dict.fromkeys(_search(items, sizes_bytes, costs, cap_bytes, price), ""))
        candidates.append(found)
    best = min(candidates, key=predicted)
    return _with_reasons(best, predicted)


def _with_reasons(cuts: Cuts, predicted: Callable[[Cuts], tuple[float, int]]) -> Cuts:
    """Says of each cut what leaving it out would cost; drops those that cost nothing."""
    kept, total_us = dict(cuts), predicted(cuts)[0]
    for item in sorted(cuts):
        without = {other: why for other, why in kept.items() if other != item}
        worse_us = predicted(without)[0] - total_us
        if worse_us <= 0 and not cuts[item]:
            kept = without
            total_us += worse_us
        else:
            kept[item] = cuts[item] or _reason(worse_us)
    return kept


def _reason(worse_us: float) -> str:
    if worse_us == math.inf:
        return "cut: one bucket with the next gradients would take more memory than buckets may"
    return f"cut: one bucket with the next gradients would cost {worse_us:.1f} us more"


def predict_us(groups: Sequence[Group], costs: Costs) -> float:
    """When the step ends with these buckets, microseconds: backward, reductions beside it, updates behind it."""
    clock = Clock(costs.sharing)
    order = sorted(range(len(groups)), key=lambda number: groups[number].items[-1])
    work_us = 0.0  # what the device has done of the work whose end is `end_us`
    for number in order:
        ready_us = costs.ready_us[groups[number].items[-1]]
        clock.run(-1, Task(us=max(0.0, ready_us - work_us)))
        work_us = max(work_us, ready_us)
        clock.run(number, Task(us=costs.launch_us, comm_us=costs.comm_us(groups[number].num_bytes)))
    clock.run(-1, Task(us=max(0.0, costs.end_us - work_us)))
    if costs.barrier:
        clock.run(-1, Task(waits_for=tuple(order)))
    for number in order:
        update_us = sum(costs.update_us[item] for item in groups[number].items)
        clock.run(-1, Task(us=update_us, waits_for=(number,)))
    return clock.now_us


@dataclass(frozen=True, slots=True)
class _State:
    """A way to cut the first items: when the link is free, when the step could end at the earliest, and the way."""

    free_us: float
    end_us: float
    lost_us: float
    """What the computation loses to communication, hidden or not."""
    start: int
    before: _State | None


def _search(items: Sequence[int], sizes_bytes: Sequence[int], costs: Costs, cap_bytes: int, price: float) -> list[int]:
    """Items behind which to cut, of one key; `price`: what a microsecond of communication costs, hidden or not."""
    units = _units(items, sizes_bytes)
    ends = [unit[-1] for unit in units]
    total_bytes = [0, *accumulate(sum(sizes_bytes[item] for item in unit) for unit in units)]
    unit_us = [sum(costs.update_us[item] for item in unit) for unit in units]
    left_us = [sum(unit_us) - done for done in [0.0, *accumulate(unit_us)]]  # updates from each unit on
    fronts: list[list[_State]] = [[_State(0.0, 0.0, 0.0, 0, None)]]
    for stop in range(1, len(units) + 1):
        ready_us = costs.ready_us[ends[stop - 1]]
        first = min(bisect_right(total_bytes, total_bytes[stop] - cap_bytes - 1), stop - 1)
        made: list[_State] = []
        for start in range(first, stop):
            comm_us = costs.sharing.collective * costs.comm_us(total_bytes[stop] - total_bytes[start])
            after_us = left_us[0 if costs.barrier else start]
            for state in fronts[start]:
                free_us = max(state.free_us, ready_us) + comm_us
                end_us = max(state.end_us, free_us + after_us)
                made.append(_State(free_us, end_us, state.lost_us + costs.launch_us + price * comm_us, start, state))
        fronts.append(_front(made))
    floor_us = costs.end_us + left_us[0]
    best = min(fronts[-1], key=lambda state: max(state.end_us, floor_us) + state.lost_us)
    return [ends[start - 1] for start in _starts(best) if start]


def _front(states: list[_State]) -> list[_State]:
    """Those that no other one beats in both times."""
    kept: list[_State] = []
    best = float("inf")
    for state in sorted(states, key=lambda state: (state.free_us, state.end_us + state.lost_us)):
        rating = state.end_us + state.lost_us
        if rating < best:
            kept.append(state)
            best = rating
    return kept


def _starts(state: _State) -> Iterator[int]:
    while state.before is not None:
        yield state.start
        state = state.before


def _units(items: Sequence[int], sizes_bytes: Sequence[int]) -> list[list[int]]:
    """Runs of items, at most MAX_UNITS of them and of about the same bytes; single items where there are few."""
    if len(items) <= MAX_UNITS:
        return [[item] for item in items]
    share = sum(sizes_bytes[item] for item in items) / (MAX_UNITS // 2)
    per_unit = -(-2 * len(items) // MAX_UNITS)
    units: list[list[int]] = [[]]
    held = 0
    for item in items:
        if units[-1] and (held + sizes_bytes[item] > share or len(units[-1]) >= per_unit):
            units.append([])
            held = 0
        units[-1].append(item)
        held += sizes_bytes[item]
    return units
