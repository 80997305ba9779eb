"""Simulates an order of tasks: start and end of each, and exposed time of collectives.

Note: the model
    One device computes, one task after another. A collective starts when it is issued, or when the one before
    it on the same link has ended, and runs beside the computation. A wait takes no time if its collective is over;
    else the device stands still until it is, and that time is *exposed*. While both go on each may be slower than
    alone: kernels of a collective take multiprocessors on a GPU, and cores on a host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One node of a graph as numbers."""

    us: float = 0.0
    """Time it takes on the device, microseconds."""
    deps: tuple[int, ...] = ()
    """Tasks that must stand before it, by number."""
    comm_us: float | None = None
    """A start of a collective: how long the link is busy, microseconds. None: it starts none."""
    link: str = ""
    """What the collective occupies; those on one link go one after another."""
    waits_for: tuple[int, ...] = ()
    """A wait: the tasks that started what it waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """When tasks run, microseconds from the start of the step, by number of the task."""

    start_us: tuple[float, ...]
    end_us: tuple[float, ...]
    comm_start_us: dict[int, float]
    comm_end_us: dict[int, float]
    exposed_us: dict[int, float]
    """For each start of a collective, how long the device stood still for it."""
    total_us: float

    @property
    def total_exposed_us(self) -> float:
        """How long the device stood still for any collective."""
        return sum(self.exposed_us.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How much longer things take beside each other than alone; factors of at least 1."""

    compute: float = 1.0
    """Computation while a collective is in flight."""
    collective: float = 1.0
    """A collective while the device computes."""


ALONE = Sharing()


class Clock:
    """The state of the simulation: one device, and links with what is queued on them."""

    def __init__(self, sharing: Sharing) -> None:
        self.sharing = sharing
        self.now_us = 0.0
        self.start_us: dict[int, float] = {}
        self.end_us: dict[int, float] = {}
        self.exposed_us: dict[int, float] = {}
        self._queues: dict[str, list[tuple[int, float]]] = {}  # number and time left if the device is idle
        self._link_of: dict[int, str] = {}

    def run(self, number: int, task: Task) -> None:
        """Lets the task pass."""
        for start in task.waits_for:
            begin = self.now_us
            while start in self._link_of:
                self._pass(min(queue[0][1] for queue in self._queues.values() if queue), computing=False)
            if start in self.exposed_us:  # what was started before the step is over
                self.exposed_us[start] += self.now_us - begin
        self._compute(task.us)
        if task.comm_us is not None:
            self.exposed_us[number] = 0.0
            self._link_of[number] = task.link
            queue = self._queues.setdefault(task.link, [])
            queue.append((number, task.comm_us))
            if len(queue) == 1:
                self.start_us[number] = self.now_us

    def first_to_end(self) -> int | None:
        """The collective in flight that ends first if the device stands still from now on; None if there is none."""
        heads = [queue[0] for queue in self._queues.values() if queue]
        return min(heads, key=lambda head: (head[1], head[0]))[0] if heads else None

    def drain(self) -> None:
        """Lets everything in flight end."""
        while (number := self.first_to_end()) is not None:
            self._pass(self._queues[self._link_of[number]][0][1], computing=False)

    def _compute(self, us: float) -> None:
        left_us = us * self.sharing.compute
        while left_us > 0 and self._link_of:
            heads = [queue[0][1] for queue in self._queues.values() if queue]
            step_us = min(left_us, min(heads) * self.sharing.collective)
            self._pass(step_us, computing=True)
            left_us -= step_us
        self.now_us += left_us / self.sharing.compute

    def _pass(self, us: float, *, computing: bool) -> None:
        """Time passes, at most until the first collective ends."""
        self.now_us += us
        done_us = us / self.sharing.collective if computing else us
        for queue in self._queues.values():
            if not queue:
                continue
            number, left_us = queue[0]
            if left_us - done_us > 1e-9:
                queue[0] = (number, left_us - done_us)
                continue
            queue.pop(0)
            del self._link_of[number]
            self.end_us[number] = self.now_us
            if queue:
                self.start_us[queue[0][0]] = self.now_us


def simulate(tasks: Sequence[Task], order: Iterable[int] | None = None, *, sharing: Sharing = ALONE) -> Timeline:
    """Runs `tasks` in the given order (their own where there is none)."""
    clock = Clock(sharing)
    starts, ends = [0.0] * len(tasks), [0.0] * len(tasks)
    for number in range(len(tasks)) if order is None else order:
        starts[number] = clock.now_us
        clock.run(number, tasks[number])
        ends[number] = clock.now_us
    clock.drain()
    return Timeline(
        start_us=tuple(starts),
        end_us=tuple(ends),
        comm_start_us=clock.start_us,
        comm_end_us=clock.end_us,
        exposed_us=clock.exposed_us,
        total_us=clock.now_us,
    )
