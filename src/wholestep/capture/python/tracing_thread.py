"""Patches that hold for the tracing thread alone, and the one lock of captures: other threads go on meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def on_this_thread(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is `replacement` on the current thread and `original` on all others.

    What runs beside a capture (a thread that logs, saves or evaluates) is no part of it.
    """
    thread = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        return (replacement if threading.get_ident() == thread else original)(*args, **kwargs)

    return call


NO_OTHER_CAPTURE = threading.RLock()
"""Held by a capture, which puts names of torch back in order, and by guards, which would see what it has put there."""

CAPTURING: list[int] = []
"""The threads of the captures that run at this moment; a list, since native code looks at it as well."""


def is_capturing() -> bool:
    """Whether this thread captures a step at this moment. What another one calls meanwhile is no part of it."""
    return threading.get_ident() in CAPTURING


@contextmanager
def capture_flag() -> Iterator[None]:
    """While open, this thread captures a step."""
    CAPTURING.append(threading.get_ident())
    try:
        yield
    finally:
        CAPTURING.remove(threading.get_ident())
