"""Which forward values to keep for the backward, and which to compute again there. Plain numbers.

Note: the model
    Calls run in the order given. A *late* call (of the backward) reads a value that an early one (of the forward)
    made, so the memory of that value, a buffer, is alive in between. To *drop* the buffer is to do the calls that made
    it again, right before the first late call that reads it; early calls read the first value, late ones the second.
    What is done again reads what is alive at that point: an input, or a buffer that is kept; anything else is done
    again, too. So each call is done again at most once, and all of it costs no more than the early calls did.

Note: the choice
    The bytes at the moment of the peak have to fall below the budget. What may be dropped there are buffers that are
    alive only for a late call; each frees its bytes and costs the time of the calls that are not done again so far.
    The cheapest that free enough are a knapsack. Then every moment of the step is weighed exactly: what is done again
    lives, too, and what leads to it. Where that leaves more than the budget at a moment, even if all that is still kept
    were dropped, the buffers to blame are found by halving, and stay. If the peak is elsewhere now the next round
    begins. In the end buffers are kept after all where the budget allows it. Where few buffers may be dropped at all,
    every choice is weighed instead.

    In a chain of layers this drops what is inside of the layers, the cheap first, and only then what the layers hand
    to each other, the earliest first, up to where recomputing a stretch would take more than the budget: that one
    stays, as a checkpoint.

Sources of the ideas: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016 (stretches between
checkpoints); Jain et al., "Checkmate", 2020 (any value of any graph may be dropped, weighed by measured cost).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations

from wholestep.cost.liveness import Usage
from wholestep.passes.memory.knapsack import Item, cheapest

_NEVER = 1 << 60
SEARCHES = 4
"""Budgets that are tried to find the smallest one that can be kept, where the one asked for cannot."""
FEW = 8
"""Up to as many buffers that may be dropped, every choice of them is weighed, and the plan is the best there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a graph."""

    usage: Usage
    """Memory that it makes and reads."""
    args: tuple[int, ...] = ()
    """Calls whose values it reads, by number."""
    buffers: tuple[int, ...] = ()
    """Memory that its value lives in: what it makes, or for a view what it is a view of."""
    late: bool = False
    """Whether it reads what was done again."""
    again_us: float | None = None
    """Time of doing it again, microseconds. None: it must not be."""
    state_bytes: int = 0
    """What must be saved before it, so that it can be done again: of a random call, the state of the generator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The calls of a step in their order; arguments stand before what reads them."""

    calls: Sequence[Call]
    pinned: Collection[int] = ()
    """Buffers that are never freed: inputs and results."""
    writable: Collection[int] = ()
    """Those of them in which a call may leave its result."""
    kept: Collection[int] = ()
    """Buffers that must not be dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is done again, and what that gives."""

    dropped: frozenset[int] = frozenset()
    """Buffers that are not kept for late calls."""
    repeats: dict[int, int]
    """Calls that are done again -> the late call right before which that is; in the order of execution."""
    us: float
    """What doing them again takes, microseconds."""
    live_bytes: list[int]
    """The most that is alive around each call (with what is done again before it), inputs not counted."""
    peak_bytes: int


class Planner:
    """Finds plans for the calls of one step."""

    def __init__(self, problem: Problem) -> None:
        self.weigher = weigher = PlanEvaluator(problem)
        calls, kept = problem.calls, {*problem.kept, *problem.pinned}
        kept.update(buffer for call in calls if call.again_us is None and not call.late for buffer in call.buffers)
        self.candidates = [
            buffer for buffer in sorted(weigher.late_values) if buffer in weigher.early_made and buffer not in kept
        ]
        self.banned: set[int] = set()
        self.nothing = weigher.weigh(frozenset())
        """The plan that does nothing again."""

    def plan(self, budget_bytes: int) -> Plan:
        """The plan that keeps the budget in little time; if none is found, the one with the smallest peak."""
        if len(self.candidates) <= FEW:
            return self._best(budget_bytes)
        low_bytes = max(budget_bytes, self.least_bytes())
        best = self._plan(low_bytes)
        for _ in range(SEARCHES):
            if best.peak_bytes <= low_bytes:
                break
            middle_bytes = (low_bytes + best.peak_bytes) // 2
            other = self._plan(middle_bytes)
            low_bytes = low_bytes if other.peak_bytes <= middle_bytes else middle_bytes
            best = min(best, other, key=lambda one: one.peak_bytes)
        return self._keep(best, max(budget_bytes, best.peak_bytes))

    def _best(self, budget_bytes: int) -> Plan:
        """The plan that keeps the budget in the least time; if none does, the one with the smallest peak."""
        counts = range(len(self.candidates) + 1)
        choices = (choice for count in counts for choice in combinations(self.candidates, count))
        plans = (self.weigher.weigh(frozenset(choice)) for choice in choices)
        return min(plans, key=lambda one: (max(one.peak_bytes, budget_bytes), one.us, one.peak_bytes))

    def least_bytes(self) -> int:
        """No plan has a smaller peak than this."""
        self.banned.clear()
        return max(self._hopes(self.nothing), default=0)

    def _hopes(self, now: Plan) -> list[int]:
        """By moment: the bytes alive if everything that may still be dropped were, and second calls took no memory."""
        first_read, change = self.weigher.first_reads(now), [0] * (len(now.live_bytes) + 1)
        for buffer in self.candidates:
            # The last early call to read it may then leave its result in that memory.
            start, end = self.weigher.last_early[buffer], first_read.get(buffer, -1)
            if start < end and buffer not in now.dropped and buffer not in self.banned:
                change[start] -= self.weigher.size_bytes[buffer]
                change[end] += self.weigher.size_bytes[buffer]
        return [live + less for live, less in zip(now.live_bytes, accumulate(change), strict=False)]

    def _plan(self, budget_bytes: int) -> Plan:
        """Drops what the budget asks for, and perhaps more."""
        now, progress = self.nothing, False
        self.banned.clear()
        while now.peak_bytes > budget_bytes:
            items = list(self._items(now))
            if items:
                buffers = self._chosen(items, now.peak_bytes - budget_bytes)
                before, now = now, self._drop(now, buffers, budget_bytes)
                progress = progress or now is not before
            elif progress and self.banned:  # what took the hope before may not do so any more
                self.banned.clear()
                progress = False
            else:
                break
        return now

    def _items(self, now: Plan) -> Iterator[tuple[int, Item]]:
        """The buffers that would free memory at the moment of the peak, with what they free and what that costs."""
        moment = now.live_bytes.index(now.peak_bytes)
        first_read = self.weigher.first_reads(now)
        for buffer in self.candidates:
            idle = self.weigher.last_early[buffer] < moment < first_read.get(buffer, -1)
            if not idle or buffer in now.dropped or buffer in self.banned:
                continue
            us, more_bytes = self.weigher.price(now, buffer)
            if self.weigher.size_bytes[buffer] > more_bytes:
                yield buffer, Item(num_bytes=self.weigher.size_bytes[buffer] - more_bytes, us=us)

    def _chosen(self, items: Sequence[tuple[int, Item]], need_bytes: int) -> list[int]:
        """The cheapest buffers that free enough, those of the lowest price first, of equal ones the earliest."""
        chosen = [items[index] for index in cheapest([item for _, item in items], need_bytes)]
        return [buffer for buffer, _ in sorted(chosen, key=lambda one: (one[1].us / one[1].num_bytes, one[0]))]

    def _drop(self, now: Plan, buffers: Sequence[int], budget_bytes: int) -> Plan:
        """`now` without those of the buffers that leave every moment the hope it had; the others are banned."""
        new = self.weigher.weigh(now.dropped.union(buffers))
        pairs = zip(self._hopes(new), self._hopes(now), strict=True)
        if not any(least > before and least > budget_bytes for least, before in pairs):
            return new
        if len(buffers) == 1:
            self.banned.update(buffers)
            return now
        half = len(buffers) // 2
        return self._drop(self._drop(now, buffers[:half], budget_bytes), buffers[half:], budget_bytes)

    def _keep(self, now: Plan, bound_bytes: int) -> Plan:
        """Keeps dropped buffers after all where the bound allows it, those first that take longest to make again."""
        calls, maker = self.weigher.calls, self.weigher.maker
        for buffer in sorted(now.dropped, key=lambda buffer: (-(calls[maker[buffer]].again_us or 0.0), buffer)):
            new = self.weigher.weigh(now.dropped - {buffer})
            if new.peak_bytes <= bound_bytes:
                now = new
        return now


class PlanEvaluator:
    """Weighs what is dropped: which calls are done again, where, in what time, and what is alive when."""

    def __init__(self, problem: Problem) -> None:
        self.calls, self.pinned = problem.calls, frozenset(problem.pinned)
        self.writable = frozenset(problem.writable)
        self.maker = {make.buffer: number for number, call in enumerate(self.calls) for make in call.usage.makes}
        self.early_made = {buffer for buffer, number in self.maker.items() if not self.calls[number].late}
        self.size_bytes = {make.buffer: make.num_bytes for call in self.calls for make in call.usage.makes}
        self.reads: dict[int, list[tuple[int, int]]] = {}
        """By buffer: (the call that reads it, the call whose value it reads it as, or -1), in order."""
        self.first_reader: dict[int, int] = {}
        """By call: the first late one that reads its value."""
        for number, call in enumerate(self.calls):
            left = dict.fromkeys(call.usage.reads)
            for arg in call.args:
                if call.late:
                    self.first_reader.setdefault(arg, number)
                for buffer in self.calls[arg].buffers:
                    self.reads.setdefault(buffer, []).append((number, self.early_value(arg, buffer)))
                    left.pop(buffer, None)
            for buffer in left:
                self.reads.setdefault(buffer, []).append((number, -1))
        self.last_read = {buffer: reads[-1][0] for buffer, reads in self.reads.items()}
        self.onto = [
            (number, make, make.onto, self.early_value(self._value_of(number, make.onto), make.onto))
            for number, call in enumerate(self.calls)
            for make in call.usage.makes
            if make.onto is not None
        ]
        """What may be made in the memory of another buffer, and as whose value the call reads that."""
        self.values = {
            number: dict.fromkeys([
                *((buffer, arg) for arg in call.args for buffer in self.calls[arg].buffers),
                *((buffer, number) for buffer in call.buffers),
                *((buffer, -1) for buffer in call.usage.reads if buffer not in self.maker),
            ])
            for number, call in enumerate(self.calls)
            if call.again_us is not None
        }  # fmt: skip
        """By call that may be done again: the memory that it touches, and as whose value."""
        self.last_early, self.first_late = dict[int, int](), dict[int, int]()
        self.late_values: dict[int, list[int]] = {}
        """By buffer: the calls as whose value a late call reads it."""
        for buffer, reads in self.reads.items():
            late = [(number, arg) for number, arg in reads if self.calls[number].late and arg >= 0]
            early = [number for number, _ in reads if not self.calls[number].late]
            self.last_early[buffer] = max(early, default=-1)
            if late:
                self.first_late[buffer] = late[0][0]
                self.late_values[buffer] = list(dict.fromkeys(arg for _, arg in late))

    def early_value(self, number: int, buffer: int) -> int:
        """The early call whose value `number` is, itself or through late views that live in `buffer`; else -1."""
        while number >= 0 and self.calls[number].late:
            number = self._value_of(number, buffer) if buffer in self.early_made else -1
        return number

    def _value_of(self, number: int, buffer: int) -> int:
        """The call as whose value `number` reads the buffer; -1 for an input."""
        return next((arg for arg in self.calls[number].args if buffer in self.calls[arg].buffers), -1)

    def is_there(self, number: int, dropped: Collection[int]) -> bool:
        """Whether the value of an early call is alive in the late part anyway."""
        return all(
            buffer in self.pinned or (buffer in self.late_values and buffer not in dropped)
            for buffer in self.calls[number].buffers
        )

    def weigh(self, dropped: frozenset[int]) -> Plan:
        """The plan that drops these buffers."""
        repeats = self._repeats(dropped)
        live = _Live(self, repeats).by_call()
        us = sum(self.calls[number].again_us or 0.0 for number in repeats)
        return Plan(dropped=dropped, repeats=repeats, us=us, live_bytes=live, peak_bytes=max(live, default=0))

    def _repeats(self, dropped: frozenset[int]) -> dict[int, int]:
        place: dict[int, int] = {}
        for buffer in dropped:
            for number in self.late_values[buffer]:
                place[number] = self.first_reader[number]
        heap = [-number for number in place]
        heapq.heapify(heap)
        while heap:  # readers before what they read, so that the first reader is known
            number = -heapq.heappop(heap)
            for arg in self.calls[number].args:
                if arg in place:
                    place[arg] = min(place[arg], place[number])
                elif self.calls[arg].again_us is not None and not self.is_there(arg, dropped):
                    place[arg] = min(place[number], self.first_reader.get(arg, _NEVER))
                    heapq.heappush(heap, -arg)
        return dict(sorted(place.items(), key=lambda item: (item[1], item[0])))

    def price(self, now: Plan, buffer: int) -> tuple[float, int]:
        """What dropping one more buffer costs: microseconds, and bytes that live longer for it."""
        dropped, seen = {*now.dropped, buffer}, set(self.late_values[buffer]) - now.repeats.keys()
        stack, us, num_bytes = list(seen), 0.0, 0
        while stack:
            call = self.calls[stack.pop()]
            us += call.again_us or 0.0
            num_bytes += call.state_bytes
            for arg in call.args:
                if arg in seen or arg in now.repeats or self.is_there(arg, dropped):
                    continue
                seen.add(arg)
                if self.calls[arg].again_us is None:
                    num_bytes += sum(self.size_bytes.get(one, 0) for one in self.calls[arg].buffers)
                else:
                    stack.append(arg)
        return us, num_bytes

    def first_reads(self, now: Plan) -> dict[int, int]:
        """By buffer: before which call its first value is read for the late part."""
        first = {buffer: number for buffer, number in self.first_late.items() if buffer not in now.dropped}
        for number, place in now.repeats.items():
            for arg in self.calls[number].args:
                for buffer in self.calls[arg].buffers if arg not in now.repeats else ():
                    first[buffer] = min(first.get(buffer, _NEVER), place)
        return first


class _Live:
    """Bytes alive over time, where some calls are done again. Time counts all calls, those done again among them.

    What the second call makes in the place of a buffer is called ``~buffer``.
    """

    def __init__(self, weigher: PlanEvaluator, repeats: dict[int, int]) -> None:
        self.weigher, self.calls, self.repeats = weigher, weigher.calls, repeats
        self.again = {number: place + index for index, (number, place) in enumerate(repeats.items())}
        """When a call is done again."""
        passed = Counter(repeats.values())
        shifts = accumulate(map(passed.__getitem__, range(len(self.calls))))
        self.time = [number + shift for number, shift in enumerate(shifts)]
        self.last = self._last_reads()

    def by_call(self) -> list[int]:
        """The most bytes alive around each call."""
        change = [0] * (len(self.calls) + len(self.repeats) + 1)
        maker, pinned, last = self.weigher.maker, self.weigher.pinned, self.last
        for memory, num_bytes in self._sizes().items():
            if memory >= 0:
                change[self.time[maker[memory]]] += num_bytes
            else:
                change[self.again[maker[~memory]]] += num_bytes
            if memory not in pinned:
                change[last[memory] + 1] -= num_bytes
        for number, when in self.again.items():
            if state_bytes := self.calls[number].state_bytes:  # what is set, and what is set back
                change[self.time[number]] += state_bytes
                change[when] += state_bytes
                change[when + 1] -= 2 * state_bytes
        alive = list(accumulate(change))
        found = [alive[when] for when in self.time]
        for number, place in self.repeats.items():
            found[place] = max(found[place], alive[self.again[number]])
        return found

    def _memory(self, buffer: int, value: int) -> int:
        """The memory that is read where a call which is done again, or a late one, reads `buffer` as `value`."""
        return ~buffer if value in self.again and self.weigher.maker.get(buffer, -1) in self.again else buffer

    def _last_reads(self) -> dict[int, int]:
        """By memory: when it is read last."""
        time = self.time
        last = {buffer: time[number] for buffer, number in self.weigher.last_read.items()}
        for buffer in {buffer for number in self.again for buffer in self.calls[number].buffers}:
            del last[buffer]
            for number, value in self.weigher.reads[buffer]:
                memory = self._memory(buffer, value) if self.calls[number].late else buffer
                last[memory] = time[number]
        for number, when in self.again.items():
            for buffer, value in self.weigher.values[number]:
                memory = self._memory(buffer, value)
                if last.get(memory, -1) < when:
                    last[memory] = when
        return last

    def _sizes(self) -> dict[int, int]:
        """Bytes of each memory; what is made in the memory of another takes that over."""
        sizes = dict(self.weigher.size_bytes)
        for number in self.again:
            sizes |= {~make.buffer: make.num_bytes for make in self.calls[number].usage.makes}
        onto = [(self.time[number], make.buffer, self._onto(number, old, value, second=False))
                for number, make, old, value in self.weigher.onto]  # fmt: skip
        onto += [(self.again[number], ~make.buffer, self._onto(number, old, value, second=True))
                 for number, make, old, value in self.weigher.onto if number in self.again]  # fmt: skip
        for when, new, old in sorted(onto):
            if self.last[old] == when and (old not in self.weigher.pinned or old in self.weigher.writable):
                sizes[new] = sizes.get(old, 0)
                if old not in self.weigher.pinned:
                    self.last[old] = when - 1
        return sizes

    def _onto(self, number: int, old: int, value: int, *, second: bool) -> int:
        return self._memory(old, value) if second or self.calls[number].late else old
