"""What has to be done for a CUDA graph, and may not be done within its capture."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

_works: list[list[Callable[[], None]]] = []
"""Of the captures that are open, the innermost last."""


@contextlib.contextmanager
def running_hooks() -> Iterator[None]:
    """Does behind its block what `after_capture` was given within, in order, if the block has come to its end."""
    _works.append([])
    try:
        yield
        for work in _works[-1]:
            work()
    finally:
        _works.pop()


def after_capture(work: Callable[[], None]) -> bool:
    """Whether there is somebody who does the work behind the capture and before the graph runs.

    There is nobody if a user of ours captures a step.
    """
    if _works:
        _works[-1].append(work)
    return bool(_works)
