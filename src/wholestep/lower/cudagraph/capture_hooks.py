"""Work that a CUDA graph needs and that must wait until its capture has ended."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

_works: list[list[Callable[[], None]]] = []
"""Of the captures that are open, the innermost last."""


@contextlib.contextmanager
def running_hooks() -> Iterator[None]:
    """Runs the work that was given to `after_capture` within the block, once the block has ended without an error."""
    _works.append([])
    try:
        yield
        for work in _works[-1]:
            work()
    finally:
        _works.pop()


def after_capture(work: Callable[[], None]) -> bool:
    """Has work done after the open capture and before the graph runs; False if no capture of ours is open.

    There is nobody if a user of ours captures a step.
    """
    if _works:
        _works[-1].append(work)
    return bool(_works)
