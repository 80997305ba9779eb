"""Bytes that an order of tasks keeps alive, from plain numbers of buffers and readers.

Note: the model
    A buffer is alive from the task that makes it to the last task that reads it; a pinned one (an input, a result)
    until the end. A task may make its result in the memory of a buffer that nobody else reads any more, as an in-place
    operation does; then it takes no memory of its own. What kernels use inside is not counted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Make:
    """A buffer that a task makes."""

    buffer: int
    num_bytes: int
    onto: int | None = None
    """The buffer in whose memory it may be made, if this task is the last to read it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one task does with memory."""

    reads: tuple[int, ...] = ()
    """Buffers it reads; each once."""
    makes: tuple[Make, ...] = ()


class Ledger:
    """Live bytes while tasks run, in any order in which a buffer is made before it is read."""

    def __init__(
        self, usages: Sequence[Usage], *, pinned: Collection[int] = (), writable: Collection[int] = ()
    ) -> None:
        """`pinned`: buffers that are never freed. `writable`: those of them in which a task may leave its result."""
        self._usages, self._pinned, self._writable = usages, frozenset(pinned), frozenset(writable)
        self._readers: dict[int, int] = {}
        for usage in usages:
            for buffer in usage.reads:
                self._readers[buffer] = self._readers.get(buffer, 0) + 1
        self._bytes: dict[int, int] = {}
        self.live_bytes = self.peak_bytes = 0

    def needed_bytes(self, number: int) -> int:
        """Memory that the task takes while it runs, beyond what is alive."""
        return sum(make.num_bytes for make in self._usages[number].makes if not self._reuses(make))

    def run(self, number: int) -> None:
        """Lets the task make its buffers, then frees those that nobody reads any more."""
        self.make(number)
        usage = self._usages[number]
        for buffer in usage.reads:
            self._readers[buffer] -= 1
        for buffer in (*usage.reads, *(make.buffer for make in usage.makes)):
            if self._readers.get(buffer, 0) == 0 and buffer not in self._pinned:
                self.live_bytes -= self._bytes.pop(buffer, 0)

    def make(self, number: int) -> None:
        """The first half of `run`: the moment in which the task needs the most."""
        for make in self._usages[number].makes:
            if self._reuses(make):
                assert make.onto is not None
                self._bytes[make.buffer] = self._bytes.pop(make.onto, 0)
            else:
                self._bytes[make.buffer] = self._bytes.get(make.buffer, 0) + make.num_bytes
                self.live_bytes += make.num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    @property
    def alive(self) -> dict[int, int]:
        """Bytes of every buffer that is alive; none for one that was made in the memory of an input."""
        return dict(self._bytes)

    def _reuses(self, make: Make) -> bool:
        free = make.onto is not None and self._readers.get(make.onto, 0) == 1
        return free and (make.onto not in self._pinned or make.onto in self._writable)


def peak_bytes(
    usages: Sequence[Usage],
    order: Iterable[int] | None = None,
    *,
    pinned: Collection[int] = (),
    writable: Collection[int] = (),
) -> int:
    """The most bytes that are alive at once, those of pinned buffers that no task makes not counted."""
    ledger = Ledger(usages, pinned=pinned, writable=writable)
    for number in range(len(usages)) if order is None else order:
        ledger.run(number)
    return ledger.peak_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The moment at which the most bytes are alive."""

    task: int
    """The task that is running; -1 where there are none."""
    alive: dict[int, int]
    """Bytes of each buffer that is alive then, by its number."""


def at_peak(usages: Sequence[Usage], *, pinned: Collection[int] = (), writable: Collection[int] = ()) -> Peak:
    """What is alive when the most is, the first time it is so, with the tasks in their own order."""
    ledger = Ledger(usages, pinned=pinned, writable=writable)
    task, most = -1, -1
    for number in range(len(usages)):
        ledger.run(number)
        if ledger.peak_bytes > most:
            task, most = number, ledger.peak_bytes
    ledger = Ledger(usages, pinned=pinned, writable=writable)
    for number in range(task):
        ledger.run(number)
    if usages:
        ledger.make(task)
    return Peak(task=task, alive=ledger.alive)
