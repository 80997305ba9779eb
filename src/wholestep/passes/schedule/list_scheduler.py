"""The order in which tasks run: a list scheduler on plain numbers.

Note: the rules
    A clock runs along (`cost.simulator`), so at every point it is known which collectives are over. What runs next is

    1. a collective whose inputs exist: the earlier it starts, the more can stand beside it; what a gather brings takes
       memory from its start on, so besides this order there are some with gathers held back
       (`wholestep.passes.schedule.prefetch`);
    2. work that a collective which has just ended makes possible and that nothing else needs: an update of parameters,
       as it frees gradients; with what it needs besides;
    3. the next task in the order that was given (it is known to be a good one for memory) that needs nothing under way;
    4. work that may stand anywhere (counters of the optimizer), to fill the time;
    5. if nothing of that is left, what needs the collective that ends first; here the device stands still.

    A wait runs right before the first task that needs it, and so do the parts of an update of which a compiler makes
    one kernel. A task of 2 or 4 is put off while it would take memory beyond the bound. Should an order pass the bound
    in spite of that, a more careful one is taken, in the end the one given.
    List scheduling: Graham, "Bounds on Multiprocessing Timing Anomalies", 1969.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace

from wholestep.cost.liveness import Ledger
from wholestep.cost.simulator import Clock, Task
from wholestep.passes.schedule.ordering_problem import Order, Problem, given_order, rate
from wholestep.passes.schedule.prefetch import prefetch

_UPDATE, _NEXT, _FILL = 0, 1, 2

ABOUT_AS_FAST, ABOUT_AS_SMALL = 1.005, 1.02
"""Orders whose predicted times and peaks differ by less than these factors count as equal."""

MAX_RESERVES = 4
"""How many amounts of work that is kept for the end are tried."""

_REACHES = (1.0, 2.0)
"""How many times as long as itself the computation is that a gather moves past: collectives share their link."""

_MAX_ROOMS = 3
"""How often less room is given to gathers, where the rest of the order needs some of it."""


def list_schedule(problem: Problem, bound_bytes: int) -> Order:
    """The fastest of several orders within `bound_bytes`; of about equal ones the smallest.

    Of those that are about equal in both, the one that exposes least, and if possible one with updates beside the
    communication: what is predicted to be hidden either way is hidden more safely by more work. The order given is
    among them, so the bound is kept if it is at least that one's own peak. If no order keeps it: the smallest one.
    """
    unchanged = replace(given_order(problem), bound_bytes=bound_bytes)
    orders = (*_with_prefetch(problem, bound_bytes), *_starting_at_once(problem, bound_bytes), unchanged)
    fits = [order for order in orders if order.peak_bytes <= bound_bytes]
    if not fits:
        return min(orders, key=lambda order: order.peak_bytes)
    fast = [order for order in fits if order.total_us <= ABOUT_AS_FAST * min(order.total_us for order in fits)]
    small = [order for order in fast if order.peak_bytes <= ABOUT_AS_SMALL * min(order.peak_bytes for order in fast)]
    return min(small, key=lambda order: round(order.exposed_us))


def reachable_bytes(problem: Problem, bound_bytes: int) -> int:
    """The smallest bound that is known to be kept, for one that no order keeps."""
    found_bytes = list_schedule(problem, bound_bytes).peak_bytes
    kept = list_schedule(problem, found_bytes).peak_bytes <= found_bytes
    return found_bytes if kept else given_order(problem).peak_bytes


def _starting_at_once(problem: Problem, bound_bytes: int) -> list[Order]:
    """Orders in which every collective starts as soon as it can."""
    eager, *kept = _with_reserves(problem, bound_bytes)
    without_late = replace(problem, late=[False] * len(problem.tasks))
    plain = _Scheduler(without_late, bound_bytes, 0.0).run()
    reason = "updates stand after the backward"
    return [*kept, eager, rate(without_late, plain, bound_bytes=bound_bytes, reason=reason)]


def _with_prefetch(problem: Problem, bound_bytes: int) -> Iterator[Order]:
    """Orders in which gathers start as early as memory allows, or as they have to; none where there are no gathers."""
    seen = set[tuple[int, ...]]()
    for reach in _REACHES if problem.gathers else ():
        room_bytes = bound_bytes
        for _ in range(_MAX_ROOMS):
            early = prefetch(problem, room_bytes, reach)
            if early.numbers in seen:
                break
            seen.add(early.numbers)
            reason = "gathers start early, the rest as given"
            yield rate(problem, early.numbers, bound_bytes=bound_bytes, reason=reason)
            found = _with_reserves(early.problem, bound_bytes)
            for order in found:
                yield replace(order, tasks=early.original(order.tasks), reason=f"gathers start early, {order.reason}")
            # What else runs early, as updates do, was not known when the gathers were moved.
            room_bytes -= min(order.peak_bytes for order in found) - bound_bytes
            if room_bytes >= bound_bytes:
                break


def _with_reserves(problem: Problem, bound_bytes: int) -> list[Order]:
    """Orders that keep ever more work to hide the last collectives."""
    orders = [_schedule(problem, bound_bytes, 0.0)]
    reserve_us = 0.0
    while orders[-1].exposed_us > 0 and len(orders) < MAX_RESERVES:
        reserve_us += orders[-1].exposed_us
        orders.append(_schedule(problem, bound_bytes, reserve_us))
    return orders


def _schedule(problem: Problem, bound_bytes: int, reserve_us: float) -> Order:
    kept = f", but {reserve_us:.0f} us of them hide the last reductions" if reserve_us else ""
    order = _Scheduler(problem, bound_bytes, reserve_us).run()
    return rate(problem, order, bound_bytes=bound_bytes, reason=f"updates follow their bucket{kept}")


class _Scheduler:
    def __init__(self, problem: Problem, bound_bytes: int, reserve_us: float) -> None:
        self.tasks, self.late, self.bound_bytes = problem.tasks, problem.late, bound_bytes
        self.clock = Clock(problem.sharing)
        self.ledger = Ledger(problem.usages, pinned=problem.pinned, writable=problem.writable)
        self.order: list[int] = []
        self.reserve_us = reserve_us
        """Work that could be done early and is kept to hide the last collectives."""
        self.late_us = sum(task.us for task, late in zip(self.tasks, self.late, strict=True) if late)
        self.done = [False] * len(self.tasks)
        self.awaits = _awaited(self.tasks)
        self.users: list[list[int]] = [[] for _ in self.tasks]
        for number, task in enumerate(self.tasks):
            for dep in task.deps:
                self.users[dep].append(number)
        self.inner = _inner(problem.joins, self.users, self.awaits)
        self.missing = [len(task.deps) for task in self.tasks]
        self.bit = {number: bit for bit, number in enumerate(_starts(self.tasks))}
        self.pending = (1 << len(self.bit)) - 1
        """Collectives that are not known to be over, a bit each; those not yet started are among them."""
        self.in_flight: list[int] = []
        self.blocked: dict[int, list[int]] = {}  # by the last of the collectives that each of them waits for
        self.heap: list[tuple[int, int]] = []
        self.held: list[tuple[int, int]] = []
        """Put off for their memory."""
        self.needed_bytes: dict[int, int] = {}
        """What each of them was found to take."""
        self.starts: list[int] = []

    def run(self) -> tuple[int, ...]:
        """The order of all tasks."""
        for number, task in enumerate(self.tasks):
            if task.comm_us is not None and not task.deps:
                heapq.heappush(self.starts, number)
            elif not task.waits_for and number not in self.inner:
                self._offer(number)
        while len(self.order) < len(self.tasks):
            self._step()
        return tuple(self.order)

    def _step(self) -> None:
        if self.starts:
            number = heapq.heappop(self.starts)
            if not self.done[number]:
                self._emit(number)
            return
        self._finish_ended()
        while self.heap:
            rank, number = heapq.heappop(self.heap)
            if self.done[number]:
                continue
            if rank == _UPDATE and self.late_us <= self.reserve_us:
                heapq.heappush(self.heap, (_FILL, number))
                continue
            free_bytes = self.bound_bytes - self.ledger.live_bytes
            if rank != _NEXT and not self._fits(number, free_bytes):
                self.held.append((rank, number))
                continue
            self._emit_with_needs(number)
            return
        self._idle()

    def _idle(self) -> None:
        """Nothing can run: takes what needs the collective that ends first, or what was put off."""
        first = self.clock.first_to_end()
        if first is not None and first in self.in_flight:
            self._finish(first)
        elif self.in_flight:
            self._finish(self.in_flight[0])
        elif self.held:
            held, self.held = sorted(self.held), []
            for _, number in held:
                if not self.done[number]:
                    self._emit_with_needs(number)
        else:  # waits that nobody reads
            self._emit_with_needs(self.done.index(False))

    def _finish_ended(self) -> None:
        """Offers what waited for collectives that are over by now."""
        for number in [number for number in self.in_flight if number in self.clock.end_us]:
            self._finish(number)

    def _finish(self, number: int) -> None:
        self.in_flight.remove(number)
        self.pending &= ~(1 << self.bit[number])
        for waiting in self.blocked.pop(self.bit[number], []):
            self._offer(waiting)

    def _offer(self, number: int) -> None:
        """Puts the task where it waits: for its turn, or for a collective that it needs."""
        needs = self.awaits[number] & self.pending
        if needs:
            self.blocked.setdefault(needs.bit_length() - 1, []).append(number)
        else:
            rank = _NEXT if not self.late[number] else _UPDATE if self.awaits[number] else _FILL
            heapq.heappush(self.heap, (rank, number))

    def _fits(self, number: int, free_bytes: int) -> bool:
        """Whether there is room for a task and what it needs. What they take is looked up again only where they may
        fit: that costs as much as the rest of the order, and is less later on only where something that they need has
        run for another one."""
        if number not in self.needed_bytes or self.needed_bytes[number] <= free_bytes:
            self.needed_bytes[number] = sum(map(self.ledger.needed_bytes, self._with_needs(number)))
        return self.needed_bytes[number] <= free_bytes

    def _with_needs(self, number: int) -> list[int]:
        """The task and whatever it needs that has not run, in order."""
        needed, stack = {number}, [number]
        while stack:
            for dep in self.tasks[stack.pop()].deps:
                if not self.done[dep] and dep not in needed:
                    needed.add(dep)
                    stack.append(dep)
        return sorted(needed)

    def _emit_with_needs(self, number: int) -> None:
        for one in self._with_needs(number):
            if not self.done[one]:
                self._emit(one)

    def _emit(self, number: int) -> None:
        task = self.tasks[number]
        live_bytes = self.ledger.live_bytes
        self.clock.run(number, task)
        self.ledger.run(number)
        self.done[number] = True
        self.order.append(number)
        self.late_us -= task.us if self.late[number] else 0.0
        if task.comm_us is not None:
            self.in_flight.append(number)
        for user in self.users[number]:
            self.missing[user] -= 1
            if self.missing[user] == 0 and self.tasks[user].comm_us is not None:
                heapq.heappush(self.starts, user)
        if self.held and self.ledger.live_bytes < live_bytes:
            self._offer_held()

    def _offer_held(self) -> None:
        """Offers again what may fit by now."""
        free_bytes = self.bound_bytes - self.ledger.live_bytes
        still = []
        for rank, number in self.held:
            if self.needed_bytes[number] <= free_bytes:
                heapq.heappush(self.heap, (rank, number))
            else:
                still.append((rank, number))
        self.held = still


def _starts(tasks: Sequence[Task]) -> list[int]:
    return [number for number, task in enumerate(tasks) if task.comm_us is not None]


def _inner(joins: Sequence[bool], users: Sequence[Sequence[int]], awaits: Sequence[int]) -> set[int]:
    """Parts of updates that run with what reads them, since they wait for the same collectives."""
    return {
        number
        for number, joins_update in enumerate(joins)
        if joins_update
        and users[number]
        and all(joins[user] and awaits[user] == awaits[number] for user in users[number])
    }


def _awaited(tasks: Sequence[Task]) -> list[int]:
    """By task, the collectives that must be over before it can run, as bits."""
    bit = {number: index for index, number in enumerate(_starts(tasks))}
    masks = [0] * len(tasks)
    for number, task in enumerate(tasks):
        mask = 0
        for dep in task.deps:
            mask |= masks[dep]
        for start in task.waits_for:
            mask |= 1 << bit[start]
        masks[number] = mask
    return masks
