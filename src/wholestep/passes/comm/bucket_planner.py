"""Which gradients share a bucket: algorithms on bytes and microseconds, without graphs.

Note: the two rules
    With a bound given by the user the assignment is that of DistributedDataParallel: a bucket takes gradients in the
    order in which they become ready until it holds at least as many bytes as its limit.
    With costs given, buckets are cut so that the predicted step is shortest, among those that expose no more than the
    fixed rule and than one bucket do. Communication of bucket k starts when its last gradient is ready and the link is
    free; what follows it on the device is the update of its parameters. Over all ways to cut, dynamic programming
    keeps those that are not worse in both the time at which the link is free and the time at which the step could end.
    It does not know that computation and communication slow each other down by how they meet; the simulation does. So
    the best in the simulation, of what was found, the fixed rule and one bucket, is where a search by single cuts
    starts: whatever leaving one out, moving one or making one improves in the simulation is taken.
    The idea of merging by measured latency and readiness: Shi et al., "MG-WFBP: Efficient Data Communication for
    Distributed Synchronous SGD", 2019.

Note: what is exposed
    The time in which the device stands still for a reduction or, where the host is the device, starts one. Exposing
    less is not always faster, since what is hidden slows computation down. The bound on it keeps a plan from being
    worse than the fixed rule where the slowdown that it relies on is less than predicted.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from wholestep.cost.simulator import ALONE, Clock, Sharing, Task

MAX_UNITS = 192
"""Cuts are looked for between at most this many runs of gradients: the search is quadratic."""

PRICES = (0.001, 3.0)
"""What communication costs where it is hidden, as shares of its time, that are tried: it slows computation down."""

DISTANCES = (8, 4, 2, 1)
"""How far a cut is moved at once, in runs of gradients."""

MAX_LOOKS = 500_000
"""How often the search by single cuts looks at a gradient: a second. A step of 150 gradients needs a tenth of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Items that share a bucket, by index in rising order, and why there are no more."""

    items: tuple[int, ...]
    num_bytes: int
    reason: str


FULL = "full: it holds as many bytes as were asked for"
DEPENDS = "closed: the next gradient depends on the reduction of one in here"
END = "end: no gradient of this type is left"

Cuts = dict[int, str]
"""Items after which a bucket is closed, each with the reason."""


def pack(
    sizes_bytes: Sequence[int],
    keys: Sequence[Hashable],
    cuts: Cuts,
    *,
    needs: Sequence[frozenset[int]] = (),
) -> list[Group]:
    """Puts items into groups, in order.

    An item joins the open group of its key or opens the next one.

    A group has items of one key and ends after an item in `cuts`. `needs[i]` are the items that must be done before
    item i can start. Nothing in a group needs the group itself, also not by way of other groups, so the groups can be
    done one after another. Groups come in the order in which they are opened.
    """
    groups: list[list[int]] = []
    reasons: list[str] = []
    opened: dict[Hashable, int] = {}
    group_of: list[int] = []
    depends_on: list[set[int]] = []  # the groups that each group needs, directly or by way of others
    for item, key in enumerate(keys):
        wanted = {group_of[other] for other in needs[item]} if needs else set()
        if wanted:
            wanted = wanted.union(*(depends_on[group] for group in wanted))
        current = opened.get(key)
        if current is not None and current in wanted:
            reasons[current], current = DEPENDS, None
        if current is None:
            current = opened[key] = len(groups)
            groups.append([])
            reasons.append(END)
            depends_on.append(set())
        groups[current].append(item)
        group_of.append(current)
        if not wanted <= depends_on[current]:
            depends_on[current] |= wanted
            for other in depends_on:
                if current in other:
                    other |= depends_on[current]
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
    comm_us: Callable[[float], float]
    """Time of one reduction of so many bytes."""
    shares: Sequence[float] = ()
    """Of each item, bytes that travel as a share of those of a reduction; none: all of them. The same for a key."""
    launch_us: float = 0.0
    """What starting one costs the computation."""
    calls_us: float = 0.0
    """What the calls that a bucket adds cost the computation: they scale it and update its parameters."""
    fill_us: float = 0.0
    """What the call costs that puts several gradients into a bucket."""
    sharing: Sharing = ALONE
    """How much longer computation and reductions take beside each other."""
    barrier: bool = False
    """Whether every update waits for all reductions (a norm over all gradients)."""


class Outcome(NamedTuple):
    """What buckets are predicted to cost, microseconds."""

    total_us: float
    """When the step ends."""
    exposed_us: float
    """How long the device does nothing but communicate."""


class _Rating(NamedTuple):
    """How good cuts are: the smaller the better, the first entry before the second."""

    over_us: float
    """What is exposed beyond the bound."""
    total_us: float
    num_groups: int


def _comm_us(costs: Costs, item: int, num_bytes: int) -> float:
    """Time of the reduction of a bucket in which the item is."""
    return costs.comm_us(num_bytes * costs.shares[item] if costs.shares else num_bytes)


def planned_cuts(
    sizes_bytes: Sequence[int],
    keys: Sequence[Hashable],
    costs: Costs,
    *,
    cap_bytes: int,
    baselines: Sequence[Cuts] = (),
    needs: Sequence[frozenset[int]] = (),
) -> Cuts:
    """The cuts with the shortest predicted step that expose no more than the baselines do.

    On a tie those with fewer buckets.

    Args:
        cap_bytes: bound of the bytes of a bucket of several gradients, since a bucket is memory on top of them.
        baselines: assignments that the found one has to beat: it exposes no more than any of them, and takes no longer
            than those that expose as little. Those that pass the cap bound what is exposed and are not taken; only
            where they expose the least can it be impossible to expose as little.
    """

    def outcome(groups: Sequence[Group]) -> Outcome:
        predicted = predict(groups, costs)
        return Outcome(round(predicted.total_us, 3), round(predicted.exposed_us, 3))

    exposed_us = [outcome(pack(sizes_bytes, keys, cuts, needs=needs)).exposed_us for cuts in baselines]
    bound_us = min(exposed_us, default=math.inf)

    def rated(cuts: Cuts) -> _Rating:
        groups = pack(sizes_bytes, keys, cuts, needs=needs)
        if any(group.num_bytes > cap_bytes and len(group.items) > 1 for group in groups):
            return _Rating(math.inf, math.inf, len(groups))
        predicted = outcome(groups)
        return _Rating(max(0.0, predicted.exposed_us - bound_us), predicted.total_us, len(groups))

    lines = [[item for item, other in enumerate(keys) if other == key] for key in dict.fromkeys(keys)]
    candidates = list(baselines)
    for price in PRICES:
        ends = [item for line in lines for item in _search(line, sizes_bytes, costs, cap_bytes, price)]
        candidates.append(dict.fromkeys(ends, ""))
    best = min(candidates, key=rated)
    places = [[unit[-1] for unit in _units(line, sizes_bytes)][:-1] for line in lines]
    trials = MAX_LOOKS // max(1, len(keys))
    searched = _local_search(frozenset(best), places, lambda cuts: rated(dict.fromkeys(cuts, "")), trials)
    return _with_reasons(best if searched == best.keys() else dict.fromkeys(sorted(searched), ""), rated)


def _local_search(
    start: frozenset[int], places: Sequence[Sequence[int]], rated: Callable[[frozenset[int]], _Rating], trials: int
) -> frozenset[int]:
    """Takes the first better change of a single cut, until there is none or trials run out."""
    # `places`: where cuts may be, a line per key.
    best, tried = start, {start: rated(start)}
    better: frozenset[int] | None = start
    while better is not None:
        best, better = better, None
        for cuts in _changed(best, places):
            if cuts not in tried:
                if len(tried) > trials:
                    return best
                tried[cuts] = rated(cuts)
            if tried[cuts] < tried[best]:
                better = cuts
                break
    return best


def _changed(cuts: frozenset[int], places: Sequence[Sequence[int]]) -> Iterator[frozenset[int]]:
    """The cuts without one of them, with one in another place, and with one more."""
    for item in sorted(cuts):
        yield cuts - {item}
    for distance in DISTANCES:
        for line in places:
            for here, there in zip(line, line[distance:], strict=False):
                if (here in cuts) != (there in cuts):
                    yield cuts ^ {here, there}
    for line in places:
        for item in line:
            if item not in cuts:
                yield cuts | {item}


def _with_reasons(cuts: Cuts, rated: Callable[[Cuts], _Rating]) -> Cuts:
    """Says of each cut what leaving it out would cost; drops those that cost nothing."""
    kept, rating = dict(cuts), rated(cuts)
    for item in sorted(cuts):
        without = {other: why for other, why in kept.items() if other != item}
        other = rated(without)
        if other <= rating and not cuts[item]:
            kept, rating = without, other
        else:
            kept[item] = cuts[item] or _reason(rating, other)
    return kept


def _reason(rating: _Rating, without: _Rating) -> str:
    if without.total_us == math.inf:
        return "cut: one bucket with the next gradients would take more memory than buckets may"
    if without.total_us <= rating.total_us:
        return f"cut: one bucket with the next gradients would expose {without.over_us:.1f} us more than fixed buckets"
    return f"cut: one bucket with the next gradients would cost {without.total_us - rating.total_us:.1f} us more"


def predict(groups: Sequence[Group], costs: Costs) -> Outcome:
    """The step with these buckets: backward, reductions beside it, updates after it."""
    clock = Clock(costs.sharing)
    order = sorted(range(len(groups)), key=lambda number: groups[number].items[-1])
    work_us = 0.0  # what the device has done of the work whose end is `end_us`
    for number in order:
        *others, last = groups[number].items
        ready_us, fill_us = costs.ready_us[last], costs.fill_us if others else 0.0
        clock.run(-1, Task(us=max(0.0, ready_us - work_us) + costs.calls_us + fill_us))
        work_us = max(work_us, ready_us)
        clock.run(number, Task(us=costs.launch_us, comm_us=_comm_us(costs, last, groups[number].num_bytes)))
    clock.run(-1, Task(us=max(0.0, costs.end_us - work_us)))
    if costs.barrier:
        clock.run(-1, Task(waits_for=tuple(order)))
    for number in order:
        update_us = sum(costs.update_us[item] for item in groups[number].items)
        clock.run(-1, Task(us=update_us, waits_for=(number,)))
    return Outcome(clock.now_us, sum(clock.exposed_us.values()) + costs.launch_us * len(groups))


@dataclass(frozen=True, slots=True)
class _State:
    """A way to cut the first items: when the link is free, and when the step could end."""

    free_us: float
    end_us: float
    lost_us: float
    """What the computation loses to communication, hidden or not."""
    start: int
    before: _State | None


def _search(items: Sequence[int], sizes_bytes: Sequence[int], costs: Costs, cap_bytes: int, price: float) -> list[int]:
    """Items of one key after which to cut, by dynamic programming."""
    # `price`: what a microsecond of communication costs, hidden or not.
    units = _units(items, sizes_bytes)
    ends = [unit[-1] for unit in units]
    total_bytes = [0, *accumulate(sum(sizes_bytes[item] for item in unit) for unit in units)]
    bucket_us = costs.launch_us + costs.calls_us + costs.fill_us
    unit_us = [sum(costs.update_us[item] for item in unit) for unit in units]
    left_us = [sum(unit_us) - done for done in [0.0, *accumulate(unit_us)]]  # updates from each unit on
    fronts: list[list[_State]] = [[_State(0.0, 0.0, 0.0, 0, None)]]
    for stop in range(1, len(units) + 1):
        ready_us = costs.ready_us[ends[stop - 1]]
        first = min(bisect_right(total_bytes, total_bytes[stop] - cap_bytes - 1), stop - 1)
        made: list[_State] = []
        for start in range(first, stop):
            comm_us = costs.sharing.collective * _comm_us(costs, items[0], total_bytes[stop] - total_bytes[start])
            after_us = left_us[0 if costs.barrier else start]
            for state in fronts[start]:
                free_us = max(state.free_us, ready_us) + comm_us
                end_us = max(state.end_us, free_us + after_us)
                made.append(_State(free_us, end_us, state.lost_us + bucket_us + price * comm_us, start, state))
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
    """Runs of items of about equal bytes, at most MAX_UNITS of them."""
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
