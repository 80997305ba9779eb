"""Where another thread is.

[Note: frames of another thread]
A frame object points into memory of the thread whose frame it is. CPython before 3.12 collects garbage whenever it
allocates, also while it makes a frame object, and what is collected may let the other thread run on. The frame object
is then tied to memory in which another frame has begun by now, and what is written through it destroys that thread: a
SIGSEGV, in this thread or, later, anywhere. So nothing is collected meanwhile. `faulthandler`, which makes no objects,
is no way out: it reads the list of threads while threads of C++ that call Python come and go, and falls over them.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_COLLECTS_AT_ALLOCATION = sys.version_info < (3, 12)
"""Later versions collect between two instructions, where no frame object is half made."""

_one_at_a_time = threading.Lock()
"""Else the first to end would have garbage collected while another one reads."""


def frames_of(thread: int) -> list[tuple[str, int]]:
    """(file, line) of the frames of a thread of this process, innermost first; empty if it has ended.

    `thread`: what ``threading.get_ident()`` gives there.
    """
    found = []
    with _one_at_a_time, _nothing_collected():
        frame: FrameType | None = sys._current_frames().get(thread)
        while frame is not None:
            found.append((frame.f_code.co_filename, frame.f_lineno))
            frame = frame.f_back
    return found


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """By the threshold: the collector may be switched off and on by other threads meanwhile, which stays as it is."""
    before, *_ = gc.get_threshold()
    if not _COLLECTS_AT_ALLOCATION or not before:
        yield
        return
    gc.set_threshold(0)
    try:
        yield
    finally:
        gc.set_threshold(before)
