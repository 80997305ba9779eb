"""Where another thread is, told without a look at its frames.

[Note: frames of another thread]
A frame object points into memory of the thread whose frame it is. CPython 3.11 may collect garbage while it makes one,
and whatever is collected may let that thread run on: the object is then tied to memory that holds another frame by now,
and what is written through either of them destroys memory of the interpreter. So nobody walks ``f_back`` of a thread
that runs. `faulthandler` writes the same as text, makes no object and lets no other thread run meanwhile.
"""

from __future__ import annotations

import faulthandler
import io
import os
import re
import tempfile
from collections.abc import Iterator

_THREAD = re.compile(r"(?:Thread|Current thread) 0x([0-9a-f]+) ")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in ')
_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")


class ThreadStack:
    """The stack of a thread of this process, for another thread that asks again and again."""

    def __init__(self, thread: int) -> None:
        """`thread`: what ``threading.get_ident()`` gives there."""
        self._thread = thread
        self._file = _unnamed_file()

    def frames(self) -> Iterator[tuple[str, int]]:
        """(file, line) of the frames, innermost first, a hundred at most; none if the thread has ended.

        Raises OSError where the dump cannot be kept.
        """
        self._file.seek(0)
        faulthandler.dump_traceback(self._file, all_threads=True)
        end = self._file.tell()
        return _frames_of(self._thread, os.pread(self._file.fileno(), end, 0).decode("ascii", errors="replace"))


def _unnamed_file() -> io.FileIO:
    """A file in memory where the system has such, else on disk; it goes when it is closed."""
    if hasattr(os, "memfd_create"):
        return io.FileIO(os.memfd_create("wholestep-stack"), "w+")
    return io.FileIO(os.dup(tempfile.TemporaryFile().fileno()), "w+")  # noqa: SIM115  closed here, open as the copy


def _frames_of(thread: int, dump: str) -> Iterator[tuple[str, int]]:
    is_asked_for = False
    for line in dump.splitlines():
        if header := _THREAD.match(line):
            is_asked_for = int(header[1], 16) == thread
        elif is_asked_for and (frame := _FRAME.match(line)):
            yield _ESCAPED.sub(lambda code: chr(int(code[1] or code[2] or code[3], 16)), frame[1]), int(frame[2])
