"""Observes which attributes of objects a traced step reads and writes, by whatever way it comes to their names.

[Note: attributes that nobody names]
Objects are watched under the names that code uses (`capture/reach/reachability.py`). Code may come to a name otherwise:
``getattr(self, "loss_" + key)``, ``vars(self)``, an ``attrgetter`` made elsewhere, a property of a library. So while a
step is traced the classes of the objects that it reaches tell what is asked of them. Whatever was not watched ends that
trace before anything comes of it, and the next one watches it.
What a trace has read or written of each object is noted. The rest may move between calls: the log of a library's
trainer, say.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

from wholestep.capture.python.code_owner import is_writable, library_frame
from wholestep.capture.python.container_views import is_dunder, own_dict

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_METHODS = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.GetSetDescriptorType, classmethod, staticmethod, property,
)  # fmt: skip
"""What a class may have under a name that is no data: what these read is observed in its turn."""
_MISSING = object()


class AttributesFound(BaseException):
    """A trace has come upon attributes that were not watched. No error: nobody may take it for one of the step's."""


@dataclass(frozen=True, slots=True)
class WatchedObject:
    """An object that a step reaches, and the names under which it is watched; None for all."""

    thing: Any
    names: Collection[str] | None


@dataclass(frozen=True, slots=True)
class HiddenThing:
    """What has a state that nobody can look at."""

    name: str
    thing: Any
    why: str
    attribute: tuple[int, str] | None
    """The id of an object that tells when it is asked for this name, behind which the thing lies; None for no such."""


class AttributeAccess:
    """The accesses of one trace to attributes that were not watched, or that lead to hidden things."""

    def __init__(self, known: Mapping[int, WatchedObject], hidden: Collection[HiddenThing] = ()) -> None:
        """`known`: by id."""
        self._known, self._thread = known, threading.get_ident()
        self._hidden: dict[int, dict[str, HiddenThing]] = {}
        for one in hidden:
            if one.attribute is not None:
                self._hidden.setdefault(one.attribute[0], {}).setdefault(one.attribute[1], one)
        self.seen_hidden: HiddenThing | None = None
        """The first that the trace came to."""
        self.found: set[str | type] = set()
        """Names, and classes of objects that are looked at whole."""
        self.read: dict[int, set[str]] | None = None
        """By id of an object, what a trace has asked it for; None before there was a trace."""
        self.asks_tensors = False
        """Whether the step has asked tensors for attributes that they do not have."""

    @contextmanager
    def observed(self) -> Iterator[None]:
        """While open, accesses are noted. Raises AttributesFound at one that might be to more than a plain value."""
        self.read = {key: set() for key, one in self._known.items() if is_observable(type(one.thing))}
        with ExitStack() as stack:
            stack.enter_context(missed_attributes(self._note_missed))
            for kind in {type(one.thing) for one in self._known.values()}:
                if is_observable(kind):
                    stack.enter_context(self._observed_class(kind))
            yield

    @contextmanager
    def _observed_class(self, kind: type) -> Iterator[None]:
        hooks = {"__getattribute__": self._read, "__setattr__": self._write, "__delattr__": self._write}
        with class_observed(kind, hooks) as is_told:
            if not is_told:
                tell = {key for key, one in self._known.items() if type(one.thing) is not kind}
                self.read = {key: names for key, names in (self.read or {}).items() if key in tell}
            yield

    def _note_missed(self, tensor: FakeTensor, name: str) -> None:
        self.asks_tensors |= not library_frame(sys._getframe(2).f_code.co_filename)

    def _unwatched(self, thing: Any, name: str) -> bool:
        one = self._known.get(id(thing)) if threading.get_ident() == self._thread else None
        if one is None or one.names is None:
            return False
        return name == "__dict__" or not (name in one.names or is_dunder(name))

    def _read(self, thing: Any, name: str) -> None:
        if self._note(thing, name):
            self._refuse_hidden(thing, name)
        if not self._unwatched(thing, name):
            return
        if name == "__dict__":
            self.found.add(type(thing))
            raise AttributesFound
        item = _held(thing, name)
        if isinstance(item, _METHODS):
            return
        self.found.add(name)
        if item is not _MISSING and type(item) not in _PLAIN:
            raise AttributesFound

    def _refuse_hidden(self, thing: Any, name: str) -> None:
        behind = self._hidden.get(id(thing), {})
        hidden = behind.get(name) or (next(iter(behind.values()), None) if name == "__dict__" else None)
        if hidden is not None:
            self.seen_hidden = self.seen_hidden or hidden
            raise AttributesFound

    def _note(self, thing: Any, name: str) -> bool:
        """Notes what an object is asked for, or given; whether anybody wants to know."""
        noted = None if self.read is None else self.read.get(id(thing))
        if noted is not None:
            noted.add(name)
        return noted is not None

    def _write(self, thing: Any, name: str, *item: Any) -> None:
        self._note(thing, name)  # a write that changes nothing does where its owner has moved the value between calls
        if self._unwatched(thing, name):
            self.found.add(name)
            raise AttributesFound


@contextmanager
def class_observed(kind: type, hooks: Mapping[str, Callable[..., None]]) -> Iterator[bool]:
    """While open, what objects of a class are asked for and given is told first to `hooks`: functions by the names
    ``__getattribute__``, ``__setattr__`` and ``__delattr__``. Gives whether it is; nothing is of a class of C."""
    own = {name: vars(kind).get(name, _MISSING) for name in hooks}
    try:
        for name, look in hooks.items():
            type.__setattr__(kind, name, _looking(look, _inherited(kind, name)))
    except TypeError:
        own = {}
    try:
        yield bool(own)
    finally:
        for name, item in own.items():
            if item is _MISSING:
                type.__delattr__(kind, name)
            else:
                type.__setattr__(kind, name, item)


@contextmanager
def missed_attributes(note: Callable[[FakeTensor, str], None]) -> Iterator[None]:
    """While open, `note` is told what tensors of a trace are asked for and do not have.

    Python calls ``__getattr__`` for what it has not found, and for nothing else.
    """
    own: Any = vars(FakeTensor).get("__getattr__", _MISSING)  # of another one that is open around this one

    def missing(tensor: FakeTensor, name: str) -> Any:
        note(tensor, name)
        if own is not _MISSING:
            return own(tensor, name)
        raise AttributeError(f"{type(tensor).__name__!r} object has no attribute {name!r}", name=name, obj=tensor)

    type.__setattr__(FakeTensor, "__getattr__", missing)
    try:
        yield
    finally:
        if own is _MISSING:
            type.__delattr__(FakeTensor, "__getattr__")
        else:
            type.__setattr__(FakeTensor, "__getattr__", own)


def is_observable(kind: type) -> bool:
    """Whether a class can be made to tell what its objects are asked for."""
    return is_writable(kind) and not issubclass(kind, types.ModuleType)


def _looking(look: Callable[..., None], original: Callable[..., Any]) -> Callable[..., Any]:
    def access(thing: Any, name: str, *item: Any) -> Any:
        look(thing, name, *item)
        return original(thing, name, *item)

    return access


def _inherited(kind: type, name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = next(vars(base)[name] for base in kind.__mro__ if name in vars(base))
    return found


def _held(thing: Any, name: str) -> Any:
    """What an object has under a name, or its class; a member of a slot is what is in it."""
    own = own_dict(thing)
    if own is not None and name in own:
        return own[name]
    item = next((vars(base)[name] for base in type(thing).__mro__ if name in vars(base)), _MISSING)
    try:
        return item.__get__(thing) if isinstance(item, types.MemberDescriptorType) else item
    except AttributeError:  # a slot with nothing in it
        return _MISSING
