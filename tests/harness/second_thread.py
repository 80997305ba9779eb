"""A thread that works while a step waits for it. It is started outside of the step, which may start none."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from unittest.mock import patch


def closed_lock() -> threading.Lock:
    """A lock that opens once: a thread waits by acquiring it."""
    lock = threading.Lock()
    lock.acquire()
    return lock


def wait_for(lock: threading.Lock) -> None:
    """Waits until another thread has released it, and leaves it open: a step that keeps a lock is refused."""
    assert lock.acquire(timeout=30)
    lock.release()


def of_a_library(*locks: threading.Lock) -> AbstractContextManager[object]:
    """While open, locks are globals of a library: a trace takes those, and none that are the user's."""
    return patch.multiple(json, create=True, **{f"_lock_{id(one)}": one for one in locks})


@contextmanager
def second_thread(work: Callable[[], object]) -> Iterator[Callable[[], None]]:
    """A thread that does this when the step calls what is given here, which waits until it is done."""
    begins, ends = closed_lock(), closed_lock()

    def run() -> None:
        wait_for(begins)
        try:
            work()
        finally:
            ends.release()

    def let() -> None:
        begins.release()
        wait_for(ends)

    with of_a_library(begins, ends), ThreadPoolExecutor(1) as threads:
        done = threads.submit(run)
        yield let
        done.result()
