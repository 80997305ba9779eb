"""Dict views of closure cells, classes, slots, sets and buffers, to compare and restore them."""

from __future__ import annotations

import array
import gc
import types
from collections import deque
from collections.abc import Collection, Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np

BUFFERS = (bytearray, memoryview, array.array, np.ndarray)
"""What holds numbers without objects of Python around them."""


_NOTHING = object()


class CellView(dict[str, Any]):
    """A closure cell as a dict with one key, or with none where its variable is not assigned."""

    def __init__(self, cell: types.CellType, key: str) -> None:
        super().__init__()
        self.cell, self.key = cell, key

    def __contains__(self, key: object) -> bool:
        try:
            _ = self.cell.cell_contents
        except ValueError:
            return False
        return key == self.key

    def __getitem__(self, key: str) -> Any:
        return self.cell.cell_contents

    def __delitem__(self, key: str) -> None:
        del self.cell.cell_contents

    def update(self, held: Any) -> None:  # type: ignore[override]
        for item in held.values():
            self.cell.cell_contents = item


class ClassView(dict[str, Any]):
    """What a class itself has under some names, without its bases, and its special methods; see `content`."""

    def __init__(self, kind: type, names: frozenset[str]) -> None:
        super().__init__()
        self.kind, self._names = kind, names
        self.attributes = attribute_dict(kind)

    def content(self) -> dict[str, Any]:
        """All of it at this moment."""
        items = vars(self.kind).copy().items()
        return {key: item for key, item in items if key in self._names or is_special_method(key, item)}

    def __delitem__(self, key: str) -> None:
        delattr(self.kind, key)

    def update(self, held: Any) -> None:  # type: ignore[override]
        for key, item in held.items():
            if vars(self.kind).get(key) is not item:
                setattr(self.kind, key, item)


def attribute_dict(kind: type) -> dict[str, Any]:
    """The dict in which a class keeps its attributes: ``vars`` gives a view of it, which has no version."""
    (found,) = gc.get_referents(vars(kind))
    assert isinstance(found, dict)
    return found


def is_special_method(key: str, item: Any) -> bool:
    """Whether an attribute of a class is a method that Python calls by itself, such as ``__mul__``."""
    return is_dunder(key) and isinstance(item, (types.FunctionType, staticmethod, classmethod, property))


def is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


class SlotsView(dict[str, Any]):
    """The attributes that an object holds outside of its ``__dict__``."""

    def __init__(self, thing: Any) -> None:
        super().__init__()
        self.thing = thing

    def __contains__(self, key: object) -> bool:
        return hasattr(self.thing, str(key))

    def __getitem__(self, key: str) -> Any:
        return getattr(self.thing, key)

    def __delitem__(self, key: str) -> None:
        delattr(self.thing, key)

    def update(self, held: Any) -> None:  # type: ignore[override]
        for key, item in held.items():
            if getattr(self.thing, key, None) is not item:
                setattr(self.thing, key, item)


OBJECT_PARTS = ("__class__", "__dict__")


class PartsView(SlotsView):
    """What an object is made of, and can be given another of: its class, and the dict of its attributes."""

    def __contains__(self, key: object) -> bool:
        return key in OBJECT_PARTS

    def __getitem__(self, key: str) -> Any:  # its class may answer otherwise
        return type(self.thing) if key == "__class__" else own_dict(self.thing)


class ContentView(dict[Any, Any]):
    """What a set, a deque, a buffer, a context variable or a view of a dict holds, by place or key; see `content`."""

    def __init__(self, thing: Any) -> None:
        super().__init__()
        self.thing = thing

    def content(self) -> dict[Any, Any]:
        """All of it at this moment. The places of a set are those in which a step would meet its items."""
        thing = self.thing
        if isinstance(thing, types.MappingProxyType):
            return dict(thing)
        if isinstance(thing, np.ndarray):
            layout = {"dtype": thing.dtype.str, "shape": thing.shape}
            return {**layout, **(dict(enumerate(thing.flat)) if thing.dtype.hasobject else {"data": thing.tobytes()})}
        if isinstance(thing, ContextVar):
            return {"value": thing.get(_NOTHING)}
        return {"data": bytes(thing)} if isinstance(thing, BUFFERS) else dict(enumerate(list(thing)))

    def update(self, held: Any) -> None:  # type: ignore[override]
        """Puts back what `content` gave. Only who has the dict behind a view can write to it."""
        thing = self.thing
        if isinstance(thing, (set, deque)):
            thing.clear()
            (thing.update if isinstance(thing, set) else thing.extend)(held.values())
        elif isinstance(thing, np.ndarray):
            items = [one for key, one in held.items() if isinstance(key, int)]
            whole = np.array(items, thing.dtype) if thing.dtype.hasobject else np.frombuffer(held["data"], thing.dtype)
            thing[...] = whole.reshape(thing.shape)
        elif isinstance(thing, array.array):
            thing[:] = array.array(thing.typecode, held["data"])
        elif isinstance(thing, BUFFERS):
            thing[:] = held["data"]
        elif isinstance(thing, ContextVar) and held["value"] is not _NOTHING:
            thing.set(held["value"])


VIEWS = (CellView, ClassView, SlotsView, ContentView)


def slots(kind: type) -> Iterator[str]:
    """Names of the attributes that objects of a class hold outside of their ``__dict__``."""
    for base in kind.__mro__:
        names = base.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            private = name.startswith("__") and not name.endswith("__")
            yield f"_{base.__name__.lstrip('_')}{name}" if private else name


def own_dict(thing: Any) -> dict[str, Any] | None:
    """The ``__dict__`` of an object, or None. Its class may answer for every name: it is not asked."""
    own: dict[str, Any] | None = attribute(thing, "__dict__", None)
    return own


def held_by(thing: Any, names: Collection[str] | None) -> Iterator[tuple[str, Any]]:
    """The attributes that an object itself has under some names, or under any if they are None."""
    for key in [*(own_dict(thing) or ()), *slots(type(thing))]:
        if (names is None or key in names) and (held := attribute(thing, key, _NOTHING)) is not _NOTHING:
            yield key, held


def attribute(thing: Any, name: str, default: Any) -> Any:
    """An attribute that an object or its class has, without Python of the class that answers for it."""
    way: Any = type(thing).__getattribute__  # in C, as that of a thread's own
    way = object.__getattribute__ if isinstance(way, types.FunctionType) else way
    try:
        return way(thing, name)
    except AttributeError:
        return default
