"""What Python sees of the symbols of a trace: they count as numbers, and there is no text of them.

[Note: the class of a symbol]
A number that moves is a ``torch.SymInt`` or ``torch.SymFloat`` in a trace. Code of the user and of libraries asks
``isinstance(x.shape[0], int)`` or ``isinstance(group["lr"], float)``, and goes another way with a symbol than in eager
code. ``isinstance``, abstract classes and ``match`` look at ``__class__`` where the type itself is another one. So that
is the class of a number while a trace runs, but for torch, which tells symbols from numbers, and for sympy behind it.
Code of the user that names ``type`` or ``len`` is given what stands in `BUILTINS` for it. That of libraries is not.

Text of a size is made: of a number, which makes the dim a constant. Text of what else a graph computes is refused.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from wholestep.capture.python import user_frame
from wholestep.capture.python.code_owner import Owner, library_frame, owner_of_file
from wholestep.capture.python.tracing_thread import on_this_thread
from wholestep.errors import CaptureError
from wholestep.ir.sizes import is_of_arguments
from wholestep.util.lazy_import import lazy_import

_NUMBERS: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
_sympy = lazy_import("sympy")


@contextmanager
def symbols_are_numbers() -> Iterator[None]:
    """While open, symbols are instances of int, float or bool for code outside of torch, on the thread that opened it.

    See [Note: the class of a symbol].
    """
    with ExitStack() as stack:
        for kind, number in _NUMBERS.items():
            stack.enter_context(class_shown(kind, partial(_always, number)))
        rounded = on_this_thread(_rounded, torch.SymInt.__round__)
        stack.enter_context(patch.object(torch.SymInt, "__round__", rounded))
        yield


@contextmanager
def class_shown(kind: type, shown: Callable[[Any], type]) -> Iterator[None]:
    """While open, objects of a class are instances of what `shown` gives, to code outside of torch on this thread."""
    around = _put_class(kind, _ClassView(shown))
    try:
        yield
    finally:
        _put_class(kind, around)


def _always(number: type, symbol: Any) -> type:
    return number


class _ClassView(property):
    """``__class__`` of traced values."""

    def __init__(self, shown: Callable[[Any], type]) -> None:
        self.shown, self._thread = shown, threading.get_ident()
        super().__init__(self._asked)

    def _asked(self, thing: Any) -> type:
        is_asked_by_others = threading.get_ident() == self._thread and asks_outside_torch(sys._getframe(1))
        return self.shown(thing) if is_asked_by_others else type(thing)


def plain_class(fake: FakeTensor) -> type:
    """That of the tensor for which a fake stands where nothing is sharded."""
    return nn.Parameter if isinstance(fake, nn.Parameter) else torch.Tensor


SHOWN_CLASS = "_wholestep_class"
"""Attribute of a class of ours whose objects stand for those of another one, which ``type`` of user code tells."""


class _AsksForTypes(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return type(*args, **kwargs)
        kind = type(args[0])
        if issubclass(kind, FakeTensor):
            view = vars(FakeTensor).get("__class__")
            return (view.shown if isinstance(view, _ClassView) else plain_class)(args[0])
        return getattr(kind, SHOWN_CLASS, None) or _NUMBERS.get(kind, kind)

    def __instancecheck__(cls, thing: Any) -> bool:
        return isinstance(thing, type)


class NumberOrType(type, metaclass=_AsksForTypes):
    """``type``, to which a symbol is an int, float or bool, and a tensor of a trace or a live step a plain one."""


def _rounded(symbol: torch.SymInt, ndigits: int | None = None) -> int | torch.SymInt:
    """Torch takes a symbol for round already, also to tens: that asks for the number."""
    return symbol if ndigits is None or ndigits >= 0 else round(int(symbol), ndigits)


def _length(thing: Any) -> Any:
    """``len``, of which Python wants a number: for a tensor the size of its first dim, which may be a symbol."""
    is_tensors = isinstance(thing, torch.Tensor) and type(thing).__len__ is torch.Tensor.__len__ and thing.dim()
    return thing.shape[0] if is_tensors else len(thing)


@contextmanager
def types_shown(scopes: Collection[dict[str, Any]]) -> Iterator[None]:
    """While open, code with these globals has the ``type`` of traces. Of those that have none of their own."""
    named = [scope for scope in scopes if "type" not in scope]
    for scope in named:
        scope["type"] = NumberOrType
    try:
        yield
    finally:
        for scope in named:
            scope.pop("type", None)


BUILTINS: dict[str, Any] = {"type": NumberOrType, "len": _length}
"""In the place of functions of Python that give a symbol another meaning than a number has."""


def asks_outside_torch(frame: FrameType | None) -> bool:
    """Whether code asks that knows of no traces: neither torch's nor ours, though Python's library may be between."""
    while frame is not None:
        file = frame.f_code.co_filename
        owner = Owner.PYTHON if file.startswith("<frozen") else owner_of_file(file)
        if owner is not Owner.PYTHON:
            return owner not in (Owner.TORCH, Owner.OURS) and not file.startswith(_sympy.__path__[0])
        frame = frame.f_back
    return False


def _put_class(kind: type, view: property | None) -> property | None:
    """Sets ``__class__`` of a class's instances; `setattr` would set the class of the class. Returns what it was."""
    (attributes,) = gc.get_referents(vars(kind))
    before: property | None = attributes.pop("__class__", None)
    if view is not None:
        attributes["__class__"] = view
    kind._wholestep = None  # type: ignore[attr-defined]  # has Python forget what it has looked up before
    del kind._wholestep  # type: ignore[attr-defined]
    return before


@contextmanager
def text_refused(refused: list[Exception]) -> Iterator[None]:
    """While open, text of a traced value raises CaptureError in the user's code, on the thread that opened it.

    `refused` gets the error too, since a handler of the user's may catch it.
    """
    with ExitStack() as stack:
        for kind in (torch.SymInt, torch.SymFloat, torch.Tensor):
            for name in ("__format__", "__str__", "__repr__"):
                stack.enter_context(patch.object(kind, name, _refused(name, getattr(kind, name), refused)))
        yield


def _refused(name: str, original: Callable[..., str], refused: list[Exception]) -> Callable[..., str]:
    def make(value: Any, *args: Any) -> str:
        if library_frame(sys._getframe(2).f_code.co_filename):  # 1 is what `on_this_thread` puts between
            return original(value, *args)
        if isinstance(value, torch.SymInt) and is_of_arguments(value):
            text: str = getattr(int(value), name)(*args)
            return text
        refused.append(
            CaptureError(
                f"The step makes text of a value that its graph computes, at {user_frame.current_line()}. Text would "
                f"be made once, while capturing. Return the value and write it outside of the step."
            )
        )
        raise refused[-1]

    return on_this_thread(make, original)
