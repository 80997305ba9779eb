"""Kills ranks while they save, again and again on the same folder, and looks at what is left."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.checkpoint_kills.saving import number_in, save_until_killed
from wholestep.errors import RankMissingError
from wholestep.runtime.distributed.launch import Workers
from wholestep.runtime.distributed.world import close_current, enter

START_S = 120.0
"""How long ranks may take to their first save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One kill, and what was there after it."""

    told: int
    """The number of the last save that had returned."""
    found: int | None
    """The number of the checkpoint that could be loaded; None if its values were of several saves."""
    remains: tuple[str, ...]
    """States of the folders beside it: "saving", "whole", "old"."""

    @property
    def is_good(self) -> bool:
        """Whether the last whole checkpoint was loaded: the last one that had returned, or the one after it."""
        return self.found is not None and 0 <= self.found - self.told <= 1


def kills(folder: Path, count: int, ranks: int = 2, seed: int = 0) -> Iterator[Kill]:
    """Kills the ranks `count` times, each time at another moment of a save; every other time one of them first."""
    moment = random.Random(seed)
    path, told = folder / "run", folder / "told"
    for number in range(count):
        before = _told(told)
        workers = Workers(ranks, functools.partial(enter, "gloo", START_S), close_current)
        call = threading.Thread(target=_saved, args=(workers, path, told, number % 3 == 2), daemon=True)
        call.start()
        save_s = _seconds_of_saves(told, before)
        time.sleep(moment.uniform(0, 2 * save_s))
        victims = [process.pid for process in workers._processes if process.pid is not None]
        moment.shuffle(victims)
        for place, pid in enumerate(victims):
            if place and number % 2:
                time.sleep(moment.uniform(0, save_s))
            os.kill(pid, signal.SIGKILL)
        call.join()
        workers.close(orderly=False)
        states = sorted(one.suffix.removeprefix(".") for one in folder.glob(".run.*"))
        yield Kill(told=_told(told), found=number_in(path), remains=tuple(states))


def _saved(workers: Workers, path: Path, told: Path, asynchronous: bool) -> None:
    with contextlib.suppress(RankMissingError):
        workers.call(save_until_killed, (path, told, asynchronous), timeout_s=START_S)


def _seconds_of_saves(told: Path, before: int) -> float:
    """Waits for two saves after a number, and says how long the second one took."""
    started = time.monotonic()
    times: list[float] = []
    for number in (before + 1, before + 2):
        while _told(told) < number:
            if time.monotonic() - started > START_S:
                raise TimeoutError(f"the ranks have not saved anything in {START_S:g} s")
            time.sleep(0.002)
        times.append(time.monotonic())
    return max(times[1] - times[0], 0.02)


def _told(told: Path) -> int:
    return int(told.read_text()) if told.exists() else 0
