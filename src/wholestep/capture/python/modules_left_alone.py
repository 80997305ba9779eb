"""Traces by make_fx that leave the methods of modules as they are.

[Note: patches of fx]
For a symbolic trace fx puts methods of its own into ``nn.Module``, and functions into globals of the user's that hold
some of `math`, since it knows no other way to see their calls. make_fx sees operators. Its tracer does nothing in those
methods, and meets no proxy among the arguments of those functions. But a method that is exchanged has Python go through
all classes of modules and forget what it knew of their attributes: a fifth of a small trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

from torch.fx import _symbolic_trace

from wholestep.capture.python.tracing_thread import on_this_thread


class _NoPatches:
    """Takes what fx would exchange, and exchanges nothing."""

    def patch(self, *_: Any, **__: Any) -> None:
        """A function in globals."""

    def patch_method(self, *_: Any, **__: Any) -> None:
        """A method of a class."""

    def visit_once(self, _: object) -> bool:
        """Whether globals have to be looked through."""
        return False


@contextmanager
def modules_left_alone() -> Iterator[None]:
    """While open, the next trace of make_fx on this thread patches nothing; those within it are as always."""
    original: Callable[[], AbstractContextManager[Any]] | None = getattr(_symbolic_trace, "_new_patcher", None)
    if original is None:  # another version of torch: slower, no more
        yield
        return
    left = [nullcontext(_NoPatches())]
    first = on_this_thread(lambda: left.pop() if left else original(), original)
    with patch.object(_symbolic_trace, "_new_patcher", first):
        yield
