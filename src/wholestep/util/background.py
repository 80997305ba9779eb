"""Background threads for which a program that ends waits a little.

A thread that comes back from C++ when the interpreter is gone aborts the process: a program that ended with an error
in the meantime would leave a core dump after its traceback, and another exit status. A thread that stays in C++ (NCCL
waits for a rank that has died) does no harm.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Callable
from weakref import WeakSet

END_WAIT_S = 5.0

_threads: WeakSet[threading.Thread] = WeakSet()
_ending = threading.Event()


def start_in_background(work: Callable[[], object]) -> threading.Thread:
    """Starts a thread that does `work`, and drops its errors: it fails again where it is needed."""

    def run() -> None:
        with contextlib.suppress(Exception):
            work()

    thread = threading.Thread(target=run, daemon=True)
    _threads.add(thread)
    thread.start()
    return thread


def is_ending() -> bool:
    """Whether the program ends: work in several parts leaves out the rest."""
    return _ending.is_set()


def _wait() -> None:
    _ending.set()
    until = time.monotonic() + END_WAIT_S
    for thread in list(_threads):
        thread.join(max(0.0, until - time.monotonic()))


atexit.register(_wait)
