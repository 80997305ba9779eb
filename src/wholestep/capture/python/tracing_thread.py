"""Patches that hold for the tracing thread alone: others call the same functions meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def on_this_thread(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is `replacement` on the current thread and `original` on all others.

    What runs beside a capture (a thread that logs, saves or evaluates) is no part of it.
    """
    thread = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        return (replacement if threading.get_ident() == thread else original)(*args, **kwargs)

    return call
