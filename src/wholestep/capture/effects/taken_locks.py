"""Locks that a trace takes: one that ends in the midst of somebody's code gives them back.

A trace ends by an exception wherever it comes upon what it cannot have. Code between ``lock.acquire()`` and
``lock.release()`` that no ``try`` guards, as there is in `logging`, would leave its lock shut for all other threads.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any


class TakenLocks:
    """Those that are taken and not given back by calls of `acquire` and `release`. ``with`` gives back by itself."""

    def __init__(self) -> None:
        self._taken: list[Any] = []
        self._waited_for: list[Any] = []

    def __bool__(self) -> bool:
        return bool(self._taken or self._waited_for)

    def note(self, method: Any) -> None:
        """A method of a lock is about to be called."""
        lock = method.__self__
        if method.__name__ == "acquire":
            is_free = lock.acquire(blocking=False)
            if is_free:
                lock.release()
            (self._taken if is_free else self._waited_for).append(lock)
        elif method.__name__ == "release":
            for locks in (self._taken, self._waited_for):
                found = next((place for place, one in enumerate(locks) if one is lock), None)
                if found is not None:
                    del locks[found]
                    break

    def give_back(self) -> None:
        """Opens those that are still taken; not one that another thread had, which may have it still."""
        while self._taken:
            with suppress(RuntimeError):  # another thread has opened it, as that of a `Condition` which is waited for
                self._taken.pop().release()
