"""Room for the frames of Python while graphs are made.

[Note: chunks of frames]
CPython keeps the frames of a thread in chunks of 16 KiB. A call that does not fit into the last chunk asks the system
for another one, and its return gives that back. A trace is some hundred frames deep. Wherever its loops happened to
call from one chunk into the next, each call cost two requests and a page fault: up to a quarter of a trace's time.

A chunk is as large as its first frame needs it, rounded up to a power of two. So a function that claims to need half of
a large one begins that chunk, and leaves the other half to all that it calls. Memory that is not touched costs nothing.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

_SLOTS = 1 << 15
"""How many values of 8 bytes the frame claims: 256 KiB, and nearly as much is left, that of 16 usual chunks."""


def with_frame_room(function: _Function) -> _Function:
    """A decorator: what `function` calls finds its frames in one chunk, however deep it calls."""
    assert isinstance(function, types.FunctionType)
    code = function.__code__
    function.__code__ = code.replace(co_stacksize=code.co_stacksize + _SLOTS)
    return function
