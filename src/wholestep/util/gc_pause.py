"""Pauses Python's garbage collector while graphs are made.

Nearly all that a trace makes stays, and what the collector has seen live it visits again whenever there is a quarter
more. What is garbage is found as soon as it may work again.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """While open nothing is collected, unless somebody asks for it. Objects without cycles are freed as always."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
