"""Locks that a trace takes: one that ends in the midst of somebody's code gives them back.

A trace ends by an exception wherever it comes upon what it cannot have. Code between ``lock.acquire()`` and
``lock.release()`` that no ``try`` guards, as there is in `logging`, would leave its lock shut for all other threads.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

LOCKS = (type(threading.Lock()), type(threading.RLock()))


class TakenLocks:
    """Those that are taken and not given back by calls of `acquire` and `release`. ``with`` gives back by itself."""

    def __init__(self) -> None:
        self._taken: list[Any] = []

    def __bool__(self) -> bool:
        return bool(self._taken)

    def note(self, method: Any) -> None:
        """A method of a lock is about to be called."""
        lock = method.__self__
        if method.__name__ == "acquire":
            if lock.acquire(blocking=False):  # else somebody has it, who may keep it for longer than this call waits
                lock.release()
                self._taken.append(lock)
        elif method.__name__ == "release":
            found = next((place for place, one in enumerate(self._taken) if one is lock), None)
            if found is not None:
                del self._taken[found]

    def give_back(self) -> None:
        """Opens those that are still taken."""
        while self._taken:
            with suppress(RuntimeError):  # another thread has opened it, as that of a `Condition` which is waited for
                self._taken.pop().release()
