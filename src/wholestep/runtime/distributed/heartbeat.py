"""A sign of life from every rank, written into the rendezvous store by a thread.

The store is the only channel that still works once a collective hangs or fails. Two kinds of news are kept there:
beats, which stop when a process dies, and farewells, which a process that ends in an orderly way leaves behind.
From them `wholestep.runtime.distributed.failure_report` tells who is missing, and
`wholestep.runtime.distributed.consensus` stops waiting for ranks that ended.
"""

from __future__ import annotations

import atexit
import json
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch.distributed as dist

from wholestep.capture.python.user_frame import line_among
from wholestep.runtime.distributed.store import PrefixStore, Store, own_connection
from wholestep.util.thread_stack import frames_of

BEAT_EVERY_S = 0.5
RANKS_PER_BEAT_PERIOD = 256  # above so many ranks each beats less often, to bound the load on the store
SILENT_AFTER_S = 15.0
"""Without a beat for so long a rank counts as gone, when nothing else is known to be wrong. Long, as a rank may be
stopped, swapped out or inside one long call that lets no other thread run."""
STUCK_AFTER_S = 5.0
"""In the same call for so long a rank counts as waiting there, when others wait for it elsewhere."""
_PREFIX = "wholestep/heartbeat"
OUTSIDE, BEFORE_INIT = "outside of any compiled step", "not yet in its World"


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """The last news of a rank."""

    count: int
    """How many beats it has sent; 0 when none was seen."""
    activity: str
    """The compiled step and call it was in, such as ``train_step, call 7``."""
    line: str
    """Where its code was, ``train.py:41``; empty when unknown."""
    unchanged_s: float
    """Seconds since this process first saw this beat."""

    def __str__(self) -> str:
        place = self.activity if self.activity in (OUTSIDE, BEFORE_INIT) else f"in {self.activity}"
        return f"{place} ({self.line})" if self.line else place


class Heartbeat:
    """Beats for this rank and keeps what it has seen of the others. `start` and `stop` bound its thread.

    `activity` may be set to a callable that says where the rank is; it is called by the thread, so it only reads.
    """

    def __init__(self, store: Store, *, rank: int, size: int) -> None:
        # A connection of its own: a call that blocks in the main thread must not hold up the beats.
        self.store = PrefixStore(_PREFIX, own_connection(store))
        self.rank = rank
        self.size = size
        self.activity: Callable[[], str] | None = None
        self.beat_every_s = BEAT_EVERY_S * max(1.0, size / RANKS_PER_BEAT_PERIOD)
        self._count = 0
        self._stopped, self._is_store_gone = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="wholestep-heartbeat", daemon=True)
        self._observed_thread = threading.get_ident()  # the thread that makes this: its place in the code is told
        self._last_seen: dict[int, tuple[bytes, float]] = {}  # rank -> last beat, when this process first saw it
        self._activity_since: dict[
            int, tuple[str, float]
        ] = {}  # rank -> what it was in, when this process first saw it there
        self._farewells: dict[int, str] = {}

    def start(self) -> None:
        self._send()
        self._thread.start()
        # The thread must be gone before the interpreter is: one that returns from C++ too late aborts the process.
        atexit.register(self.stop)

    def stop(self, farewell: str = "") -> None:
        """End the thread, and say farewell: by default how this program ends."""
        if self._stopped.is_set():
            return
        self.stop_silently()
        if not self._is_store_gone:
            _say_farewell(self.store, self.rank, farewell)

    def stop_silently(self) -> None:
        """End the thread: what the others hear of next is another heartbeat of this rank."""
        self._stopped.set()
        atexit.unregister(self.stop)
        self._thread.join(timeout=2.0)

    def beats(self, ranks: Iterable[int]) -> dict[int, Beat]:
        """The last beat of each rank, as seen now and compared with what was seen before."""
        now = time.monotonic()
        found = {}
        for rank in ranks:
            raw = self.store.get(f"beat/{rank}") if self.store.check([f"beat/{rank}"]) else b""
            if rank not in self._last_seen or self._last_seen[rank][0] != raw:
                self._last_seen[rank] = (raw, now)
            count, activity, line = json.loads(raw) if raw else (0, BEFORE_INIT, "")
            found[rank] = Beat(count=count, activity=activity, line=line, unchanged_s=now - self._last_seen[rank][1])
        return found

    def stuck(self, ranks: Iterable[int], activity: str) -> dict[int, Beat]:
        """Those of `ranks` that beat and have been in `activity` for long, as far as this process has looked."""
        now = time.monotonic()
        found = {}
        for rank, beat in self.beats(ranks).items():
            if rank not in self._activity_since or self._activity_since[rank][0] != beat.activity:
                self._activity_since[rank] = (beat.activity, now)
            if beat.activity == activity and now - self._activity_since[rank][1] > STUCK_AFTER_S:
                found[rank] = beat
        return found

    def farewells(self) -> dict[int, str]:
        """Ranks that ended in an orderly way, and how. Costs one question when there is no news."""
        total = self.store.add("farewells", 0)
        for number in range(len(self._farewells) + 1, total + 1):
            if not self.store.check([f"farewell/{number}"]):
                break  # counted and not yet written
            rank, how = json.loads(self.store.get(f"farewell/{number}"))
            self._farewells[rank] = how
        return dict(self._farewells)

    def departed(self, ranks: Iterable[int]) -> dict[int, str]:
        """Those of `ranks` that have ended or gone silent, and how that is known."""
        asked = set(ranks) - {self.rank}
        known = {rank: how for rank, how in self.farewells().items() if rank in asked}
        for rank, beat in self.beats(asked - known.keys()).items():
            if beat.count and beat.unchanged_s > max(SILENT_AFTER_S, 4 * self.beat_every_s):
                known[rank] = f"has given no sign of life for {beat.unchanged_s:.0f} s; it was last {beat}"
        return known

    def _run(self) -> None:
        while not self._stopped.wait(self.beat_every_s):
            try:
                self._send()
            except dist.DistError:
                self._is_store_gone = True  # and the job with it
                return

    def _send(self) -> None:
        self._count += 1
        activity, line = self.activity, line_among(frames_of(self._observed_thread))
        beat = [self._count, OUTSIDE if activity is None else activity(), line]
        self.store.set(f"beat/{self.rank}", json.dumps(beat))


def say_farewell(store: Store, rank: int, farewell: str = "") -> None:
    """What `Heartbeat.stop` says, of a rank that has no heartbeat. Makes no connection."""
    _say_farewell(PrefixStore(_PREFIX, store), rank, farewell)


def _say_farewell(store: Store, rank: int, farewell: str) -> None:
    try:
        number = store.add("farewells", 1)
        store.set(f"farewell/{number}", json.dumps([rank, farewell or _how_this_program_ends()]))
    except RuntimeError:  # of torch's stores, DistError among them
        return  # nobody is left to read it, or this store is none, as that of a fake group


def _how_this_program_ends() -> str:
    """For atexit, where `sys.last_value` holds the exception that ended the program, if one did."""
    error = getattr(sys, "last_value", None)
    if error is None:
        return "ended its program"
    first_line = (str(error).splitlines() or [""])[0]
    return f"ended its program with {type(error).__name__}: {first_line}"
