"""Text that a step makes of traced tensors and numbers: placeholders, and one warning."""

from __future__ import annotations

import builtins
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from wholestep.capture.python import user_frame
from wholestep.capture.python.code_owner import library_frame
from wholestep.capture.python.tracing_thread import on_this_thread

PLACEHOLDER_TEXT = "(a number of the step)"
"""What stands in texts for a number that is known when the step runs: no number, so that nobody takes it for one."""


@contextmanager
def symbolic_text() -> Iterator[None]:
    """While open, ``print`` of a tensor and text of a number warn, for the thread that opened it."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(builtins, "print", _warn_print(builtins.print)))
        for kind in (torch.SymInt, torch.SymFloat):
            for name in ("__format__", "__str__", "__repr__"):
                stack.enter_context(patch.object(kind, name, _text(getattr(kind, name))))
        yield


def _text(original: Callable[..., str]) -> Callable[..., str]:
    def make(symbol: Any, *args: Any) -> str:
        if library_frame(sys._getframe(2).f_code.co_filename):  # 1 is what `here` puts between
            return original(symbol, *args)
        _warn("text of a number")
        return PLACEHOLDER_TEXT

    return on_this_thread(make, original)


def _warn_print(original: Callable[..., None]) -> Callable[..., None]:
    def show(*args: Any, **kwargs: Any) -> None:
        if any(isinstance(one, (torch.Tensor, torch.SymFloat, torch.SymInt)) or _is_later(one) for one in args):
            _warn("print() of a tensor")
        else:
            original(*args, **kwargs)

    return on_this_thread(show, original)


def _is_later(thing: Any) -> bool:
    text = str(thing)
    return "FakeTensor(" in text or PLACEHOLDER_TEXT in text


def _warn(what: str) -> None:
    warnings.warn(
        f"{what} at {user_frame.current_line()} ran once, while the step was captured, when the tensor had no value; "
        "it "
        f"does not run again. Return the tensor and print it outside the step.",
        stacklevel=4,
    )
