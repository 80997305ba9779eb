"""What a plan of recomputation does and needs: repeated calls, time, live bytes.

Calls run in the order given. A *late* call (of the backward) reads a value that an early one (of the forward) made, so
the memory of that value, a buffer, is alive in between. To *drop* the buffer is to do the calls that made it again,
right before the first late call that reads it; early calls read the first value, late ones the second. A call that is
done again reads what is alive at that point: an input, or a buffer that is kept; anything else is done again, too. So
each call is done again at most once, and all of it costs no more than the early calls did.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

from wholestep.cost.liveness import Usage

_NEVER = 1 << 60


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
    recompute_us: float | None = None
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


Read = tuple[int, int]
"""(The call that reads a buffer, the early call as whose value it does, or -1)."""
Access = tuple[int, int]
"""(A buffer, the call as whose value it is read or written, or -1)."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """A call that may make a buffer in the memory of another one.

    `value`: the early call as whose value it reads that, or -1.
    """

    call: int
    new: int
    old: int
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """Indexes of a problem: which calls make and read each buffer, early and late."""

    calls: Sequence[Call]
    pinned: frozenset[int]
    writable: frozenset[int]
    makers: dict[int, int]
    """By buffer: the call that makes it."""
    size_bytes: dict[int, int]
    """By buffer."""
    reads: dict[int, list[Read]]
    """By buffer, in order."""
    last_reads: dict[int, int]
    """By buffer: the last call that reads it."""
    last_early_reads: dict[int, int]
    """By buffer that is read: the last early call that reads it, or -1."""
    first_late_reads: dict[int, int]
    """By buffer: the first late call that reads it as a value of an early one."""
    late_values: dict[int, list[int]]
    """By buffer: the early calls as whose value late calls read it."""
    first_late_readers: dict[int, int]
    """By call: the first late call that has its value as an argument."""
    reuses: list[Reuse]
    """In the order of the calls."""
    accesses: dict[int, list[Access]]
    """By call that may be done again: the memory that it touches."""


def liveness(problem: Problem) -> Liveness:
    """The indexes of a problem."""
    calls = problem.calls
    makers = {make.buffer: number for number, call in enumerate(calls) for make in call.usage.makes}
    reads = _reads(calls, makers)
    late_reads = _late_reads(calls, reads)
    return Liveness(
        calls=calls,
        pinned=frozenset(problem.pinned),
        writable=frozenset(problem.writable),
        makers=makers,
        size_bytes={make.buffer: make.num_bytes for call in calls for make in call.usage.makes},
        reads=reads,
        last_reads={buffer: found[-1][0] for buffer, found in reads.items()},
        last_early_reads=_last_early_reads(calls, reads),
        first_late_reads={buffer: found[0][0] for buffer, found in late_reads.items()},
        late_values={buffer: list(dict.fromkeys(value for _, value in found)) for buffer, found in late_reads.items()},
        first_late_readers=_first_late_readers(calls),
        reuses=_reuses(calls, makers),
        accesses=_accesses(calls, makers),
    )


def _reads(calls: Sequence[Call], makers: dict[int, int]) -> dict[int, list[Read]]:
    """By buffer, its reads: by way of arguments, and otherwise."""
    reads: dict[int, list[Read]] = {}
    for number, call in enumerate(calls):
        others = dict.fromkeys(call.usage.reads)
        for arg in call.args:
            for buffer in calls[arg].buffers:
                reads.setdefault(buffer, []).append((number, _early_value(calls, makers, arg, buffer)))
                others.pop(buffer, None)
        for buffer in others:
            reads.setdefault(buffer, []).append((number, -1))
    return reads


def _late_reads(calls: Sequence[Call], reads: dict[int, list[Read]]) -> dict[int, list[Read]]:
    """By buffer, the reads by late calls of values that early calls made."""
    late = {
        buffer: [(number, value) for number, value in found if calls[number].late and value >= 0]
        for buffer, found in reads.items()
    }
    return {buffer: found for buffer, found in late.items() if found}


def _last_early_reads(calls: Sequence[Call], reads: dict[int, list[Read]]) -> dict[int, int]:
    return {
        buffer: max((number for number, _ in found if not calls[number].late), default=-1)
        for buffer, found in reads.items()
    }


def _first_late_readers(calls: Sequence[Call]) -> dict[int, int]:
    first: dict[int, int] = {}
    for number, call in enumerate(calls):
        for arg in call.args if call.late else ():
            first.setdefault(arg, number)
    return first


def _reuses(calls: Sequence[Call], makers: dict[int, int]) -> list[Reuse]:
    return [
        Reuse(
            number, make.buffer, make.onto, _early_value(calls, makers, _value_of(calls, number, make.onto), make.onto)
        )
        for number, call in enumerate(calls)
        for make in call.usage.makes
        if make.onto is not None
    ]


def _accesses(calls: Sequence[Call], makers: dict[int, int]) -> dict[int, list[Access]]:
    accesses = {}
    for number, call in enumerate(calls):
        if call.recompute_us is not None:
            of_args = ((buffer, arg) for arg in call.args for buffer in calls[arg].buffers)
            own = ((buffer, number) for buffer in call.buffers)
            of_inputs = ((buffer, -1) for buffer in call.usage.reads if buffer not in makers)
            accesses[number] = list(dict.fromkeys([*of_args, *own, *of_inputs]))
    return accesses


def _early_value(calls: Sequence[Call], makers: dict[int, int], number: int, buffer: int) -> int:
    """The early call whose value `number` gives, perhaps through late views; else -1."""
    # The views live in `buffer`.
    while number >= 0 and calls[number].late:
        number = _value_of(calls, number, buffer) if _is_made_early(calls, makers, buffer) else -1
    return number


def _value_of(calls: Sequence[Call], number: int, buffer: int) -> int:
    """The call as whose value `number` reads the buffer; -1 for an input."""
    return next((arg for arg in calls[number].args if buffer in calls[arg].buffers), -1)


def _is_made_early(calls: Sequence[Call], makers: dict[int, int], buffer: int) -> bool:
    return buffer in makers and not calls[makers[buffer]].late


def candidates(live: Liveness, kept: Collection[int]) -> list[int]:
    """The buffers that may be dropped: late calls read them, and their calls may be repeated."""
    fixed = {*kept, *live.pinned}
    fixed.update(
        buffer for call in live.calls if call.recompute_us is None and not call.late for buffer in call.buffers
    )
    early = (buffer for buffer in sorted(live.late_values) if _is_made_early(live.calls, live.makers, buffer))
    return [buffer for buffer in early if buffer not in fixed]


def evaluate(live: Liveness, dropped: frozenset[int]) -> Plan:
    """The plan that drops these buffers."""
    repeats = _repeats(live, dropped)
    live_bytes = _LiveBytes(live, repeats).by_call()
    us = sum(live.calls[number].recompute_us or 0.0 for number in repeats)
    return Plan(dropped=dropped, repeats=repeats, us=us, live_bytes=live_bytes, peak_bytes=max(live_bytes, default=0))


def _repeats(live: Liveness, dropped: frozenset[int]) -> dict[int, int]:
    """The calls that are done again, each with the late call before which that is."""
    place = {number: live.first_late_readers[number] for buffer in dropped for number in live.late_values[buffer]}
    heap = [-number for number in place]
    heapq.heapify(heap)
    while heap:  # readers before what they read, so that the first reader is known
        number = -heapq.heappop(heap)
        for arg in live.calls[number].args:
            if arg in place:
                place[arg] = min(place[arg], place[number])
            elif live.calls[arg].recompute_us is not None and not _is_available(live, arg, dropped):
                place[arg] = min(place[number], live.first_late_readers.get(arg, _NEVER))
                heapq.heappush(heap, -arg)
    return dict(sorted(place.items(), key=lambda item: (item[1], item[0])))


def _is_available(live: Liveness, number: int, dropped: Collection[int]) -> bool:
    """Whether the value of an early call is alive in the late part anyway."""
    return all(
        buffer in live.pinned or (buffer in live.late_values and buffer not in dropped)
        for buffer in live.calls[number].buffers
    )


def added_cost(live: Liveness, plan: Plan, buffer: int) -> tuple[float, int]:
    """What dropping one more buffer costs: microseconds, and bytes that live longer for it."""
    dropped, seen = {*plan.dropped, buffer}, set(live.late_values[buffer]) - plan.repeats.keys()
    stack, us, num_bytes = list(seen), 0.0, 0
    while stack:
        call = live.calls[stack.pop()]
        us += call.recompute_us or 0.0
        num_bytes += call.state_bytes
        for arg in call.args:
            if arg in seen or arg in plan.repeats or _is_available(live, arg, dropped):
                continue
            seen.add(arg)
            if live.calls[arg].recompute_us is None:
                num_bytes += sum(live.size_bytes.get(one, 0) for one in live.calls[arg].buffers)
            else:
                stack.append(arg)
    return us, num_bytes


def first_late_reads(live: Liveness, plan: Plan) -> dict[int, int]:
    """By buffer: before which call its first value is read for the late part."""
    first = {buffer: number for buffer, number in live.first_late_reads.items() if buffer not in plan.dropped}
    for number, place in plan.repeats.items():
        for arg in live.calls[number].args:
            for buffer in live.calls[arg].buffers if arg not in plan.repeats else ():
                first[buffer] = min(first.get(buffer, _NEVER), place)
    return first


class _LiveBytes:
    """Bytes alive over time, where some calls are done again.

    Time counts all calls, those done again among them. What the second call makes in the place of a buffer is
    `~buffer`.

    What the second call makes in the place of a buffer is called ``~buffer``.
    """

    def __init__(self, live: Liveness, repeats: dict[int, int]) -> None:
        self.live, self.calls, self.repeats = live, live.calls, repeats
        self.again = {number: place + index for index, (number, place) in enumerate(repeats.items())}
        """When a call is done again."""
        passed = Counter(repeats.values())
        shifts = accumulate(map(passed.__getitem__, range(len(self.calls))))
        self.time = [number + shift for number, shift in enumerate(shifts)]
        self.last = self._last_reads()

    def by_call(self) -> list[int]:
        """The most bytes alive around each call."""
        change = [0] * (len(self.calls) + len(self.repeats) + 1)
        makers, pinned, last = self.live.makers, self.live.pinned, self.last
        for memory, num_bytes in self._sizes().items():
            if memory >= 0:
                change[self.time[makers[memory]]] += num_bytes
            else:
                change[self.again[makers[~memory]]] += num_bytes
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
        """The memory that late and repeated calls read where they read `buffer` as `value`."""
        return ~buffer if value in self.again and self.live.makers.get(buffer, -1) in self.again else buffer

    def _last_reads(self) -> dict[int, int]:
        """By memory: when it is read last."""
        time = self.time
        last = {buffer: time[number] for buffer, number in self.live.last_reads.items()}
        for buffer in {buffer for number in self.again for buffer in self.calls[number].buffers}:
            del last[buffer]
            for number, value in self.live.reads[buffer]:
                memory = self._memory(buffer, value) if self.calls[number].late else buffer
                last[memory] = time[number]
        for number, when in self.again.items():
            for buffer, value in self.live.accesses[number]:
                memory = self._memory(buffer, value)
                if last.get(memory, -1) < when:
                    last[memory] = when
        return last

    def _sizes(self) -> dict[int, int]:
        """Bytes of each memory; what is made in the memory of another takes that over."""
        sizes = dict(self.live.size_bytes)
        for number in self.again:
            sizes |= {~make.buffer: make.num_bytes for make in self.calls[number].usage.makes}
        reuses: list[tuple[int, int, int]] = []  # (when, the memory that is made, the one that it may take over)
        for reuse in self.live.reuses:
            old = self._memory(reuse.old, reuse.value)
            reuses.append((self.time[reuse.call], reuse.new, old if self.calls[reuse.call].late else reuse.old))
            if reuse.call in self.again:
                reuses.append((self.again[reuse.call], ~reuse.new, old))
        for when, new, old in sorted(reuses):
            if self.last[old] == when and (old not in self.live.pinned or old in self.live.writable):
                sizes[new] = sizes.get(old, 0)
                if old not in self.live.pinned:
                    self.last[old] = when - 1
        return sizes
