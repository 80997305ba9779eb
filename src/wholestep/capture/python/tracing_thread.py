"""Patches that hold for the tracing thread alone: others call the same functions meanwhile."""

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


CAPTURING: list[None] = []
"""One item per capture that runs at this moment; a list, since native code looks at it as well."""


def is_capturing() -> bool:
    """Whether a step is being captured at this moment."""
    return bool(CAPTURING)


@contextmanager
def capture_flag() -> Iterator[None]:
    """While open, a step is being captured."""
    CAPTURING.append(None)
    try:
        yield
    finally:
        CAPTURING.pop()
