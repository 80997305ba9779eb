"""Turns an error met while tracing into one that names the user's file and line."""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from wholestep.capture.python.code_owner import library_frame
from wholestep.errors import CaptureError, WholestepError

ASKS_FOR_A_NUMBER = GuardOnDataDependentSymNode
"""What torch raises where it has to know a number that the graph will compute."""

_VALUE_DRIVES_PYTHON = (
    "the value of a tensor decides what Python does here (an `if`, `float()`, `int()`, a shape). A step that becomes "
    "one graph cannot look at values. Use torch.where, keep the value as a tensor or return it (`return loss.item()` "
    "is fine), or move the decision out of the step."
)
_REMEDIES = {
    "nn/modules/batchnorm.py": "A BatchNorm that averages over all batches (momentum=None) looks at how many there "
    "were: give it a momentum.",
    "amp/grad_scaler.py": "GradScaler.step() looks whether there was an infinity, unless the optimizer does so itself: "
    "give it fused=True, as Adam, AdamW and SGD take it.",
}
"""What helps where a part of torch looks at a value, by a piece of its file's name."""
_OF_TORCH = {
    "through example input": "The backward goes on beyond a tensor that was computed outside of the step. Compute it "
    "in the step, or pass its detach(), take the gradient with torch.autograd.grad and return it.",
    "Couldn't swap": "The step converts or moves parameters here. Do it before the step, once.",
}
"""What helps against an error of torch, by a piece of its text."""
CHANCE = (
    "A random draw is compared with a probability here. One of 0 or 1 is captured, since its answer is certain: set it "
    "to 0 (layerdrop, encoder_layerdrop, decoder_layerdrop in models of Hugging Face), or draw what is to be skipped "
    "outside of the step."
)
"""What helps where chance decides; a note on the error."""
_NUMPY = (
    "a tensor is turned into numpy or a Python list here, which needs its values. "
    "Return the tensor and convert it outside the step."
)
_NO_FAKE = (
    "this operator has no fake kernel, so its result's shape is not known before it runs. "
    "Register one with torch.library.register_fake."
)

_STANDARD = os.path.dirname(os.__file__) + os.sep
"""Python's own modules: a rank that waits in `queue` or `threading` is at the line of the user that led there."""


def user_line(trace: TracebackType | None) -> str:
    """``file.py:12 in train_step`` of the deepest frame that is the user's; "an unknown line" if there is none."""
    for frame in reversed(traceback.extract_tb(trace)):
        if not library_frame(frame.filename):
            return f"{frame.filename}:{frame.lineno} in {frame.name}" + (f"\n    {frame.line}" if frame.line else "")
    return "an unknown line"


def current_line() -> str:
    """``file.py:12`` of the innermost running frame that is the user's, with the file's base name; "" if none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_user_file(file := frame.f_code.co_filename):
            return _place(file, frame.f_lineno)
        frame = frame.f_back
    return ""


def line_among(frames: Iterable[tuple[str, int]]) -> str:
    """`current_line` of a stack that is given as (file, line) of its frames, innermost first."""
    return next((_place(file, line) for file, line in frames if _is_user_file(file)), "")


def _is_user_file(file: str) -> bool:
    """Whether code of this file is the user's, and neither of a library nor of Python."""
    return not library_frame(file) and (not file.startswith(_STANDARD) or "site-packages" in file)


def _place(file: str, line: int) -> str:
    return f"{file.rpartition('/')[2]}:{line}"


def calling_function(word: str) -> str | None:
    """The outermost running function of torch.distributed with `word` in its name that the user's code called."""
    frame, found = sys._getframe(1), None
    while frame is not None and library_frame(frame.f_code.co_filename):
        if word in frame.f_code.co_name and frame.f_globals.get("__name__", "").startswith("torch.distributed"):
            found = frame.f_code.co_name
        frame = frame.f_back  # type: ignore[assignment]
    return found


def defined_at(step: Any) -> str:
    """``train_step, file.py:10``: name, file and first line of a step."""
    function = inspect.unwrap(getattr(step, "func", step))
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    name = getattr(step, "__name__", type(step).__name__)
    return f"{name}, {code.co_filename}:{code.co_firstlineno}" if code else name


@contextmanager
def naming(step: Any) -> Iterator[None]:
    """Adds name, file and line of the step to an error of ours that names no line in its file yet."""
    try:
        yield
    except WholestepError as error:
        place = defined_at(step)
        if f"{place.rpartition(', ')[2].rpartition(':')[0]}:" not in str(error) and error.args:
            error.args = (f"{error.args[0]}\nThe step is {place}.", *error.args[1:])
        raise


_FRAMES_OF_CPP = "\nException raised from "
"""Behind it some errors of torch list addresses in its libraries, which say nothing to a user."""


def explain(error: BaseException) -> WholestepError:
    """The CaptureError that says what went wrong in the user's terms, and where."""
    if isinstance(error, WholestepError):
        return error
    if isinstance(error, KeyError) and error.__context__ is not None and _last_file(error).endswith("fx/graph.py"):
        error = error.__context__  # torch 2.11 fails at printing the unfinished graph, which hides the cause
    where, text = user_line(error.__traceback__), str(error).partition(_FRAMES_OF_CPP)[0].rstrip()
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException, ASKS_FOR_A_NUMBER)):
        reason = " ".join([_VALUE_DRIVES_PYTHON, *_remedies(error)])
    elif (
        isinstance(error, UnsupportedOperatorException)
        or "no fake impl" in text
        or "fake kernel" in text
        or ("Meta" in text and "NotImplemented" in type(error).__name__)
    ):
        reason = f"{_NO_FAKE} ({text.splitlines()[0]})"
    elif isinstance(error, TypeError) and "__format__" in text:
        reason = "a tensor's value is formatted into text here. Print what the step returns, outside the step."
    elif "numpy" in text.lower() or "tolist" in text:
        reason = _NUMPY
    else:
        helping = [remedy for piece, remedy in _OF_TORCH.items() if piece in text]
        reason = "\n".join([f"{type(error).__name__}: {text}", *helping])
    return CaptureError(f"The step could not be captured at {where}\n{reason}")


def _remedies(error: BaseException) -> list[str]:
    files = [frame.filename.replace(os.sep, "/") for frame in traceback.extract_tb(error.__traceback__)]
    files = [file for file in files if library_frame(file)]
    chance = [CHANCE] if CHANCE in getattr(error, "__notes__", ()) else []
    return [remedy for piece, remedy in _REMEDIES.items() if any(piece in file for file in files)] + chance


def _last_file(error: BaseException) -> str:
    return traceback.extract_tb(error.__traceback__)[-1].filename
