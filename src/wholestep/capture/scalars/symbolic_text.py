"""Refuses a step that makes text of traced tensors and numbers: there is none before they are computed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from wholestep.capture.python import user_frame
from wholestep.capture.python.code_owner import library_frame
from wholestep.capture.python.tracing_thread import on_this_thread
from wholestep.errors import CaptureError


@contextmanager
def text_refused(refused: list[Exception]) -> Iterator[None]:
    """While open, text of a traced value raises CaptureError in the user's code, on the thread that opened it.

    `refused` gets the error too, since a handler of the user's may catch it.
    """
    with ExitStack() as stack:
        for kind in (torch.SymInt, torch.SymFloat, torch.Tensor):
            for name in ("__format__", "__str__", "__repr__"):
                stack.enter_context(patch.object(kind, name, _refused(getattr(kind, name), refused)))
        yield


def _refused(original: Callable[..., str], refused: list[Exception]) -> Callable[..., str]:
    def make(value: Any, *args: Any) -> str:
        if library_frame(sys._getframe(2).f_code.co_filename):  # 1 is what `on_this_thread` puts between
            return original(value, *args)
        refused.append(
            CaptureError(
                f"The step makes text of a value that its graph computes, at {user_frame.current_line()}. Text would "
                f"be made once, while capturing. Return the value and write it outside of the step."
            )
        )
        raise refused[-1]

    return on_this_thread(make, original)
