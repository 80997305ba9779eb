"""Snapshot: a container that a step may read, its content while tracing, and changes since."""

from __future__ import annotations

import types
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from wholestep.capture.python.container_views import VIEWS, CellView, ClassView, ContentView, SlotsView

SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Kinds of things that are compared by value."""


@dataclass(slots=True)
class Snapshot:
    """One dict or list that the step may read, and what it held while tracing."""

    container: Any
    path: str
    """How a person would write it: ``model.layers.0``, ``globals``."""
    keys: tuple[Any, ...] | None
    """Only these keys are looked at; None means all."""
    held: Any = None
    guard: bool = True
    """Whether a change between calls means a retrace. A change while tracing is always refused."""
    ordered: bool = False
    """Whether the order of the keys of a dict counts: a step may go through it."""
    varying_keys: frozenset[Any] = frozenset()
    """Keys of numbers that the graph reads at every call: they may be any of their type."""

    def now(self) -> Any:
        """What the container holds at this moment."""
        container = self.container
        if isinstance(container, list):
            return list.copy(container)
        if isinstance(container, (ContentView, ClassView)):
            return container.content()
        if isinstance(container, dict) and not isinstance(container, VIEWS):
            return _held(container, self.keys)
        if self.keys is None:
            return dict(container)
        return {key: container[key] for key in self.keys if key in container}

    def changes(self) -> Iterator[tuple[str, Any, Any]]:
        """What differs from the trace: (path, then, now)."""
        return ((path, then, now) for _, path, then, now in self.changed_items())

    def changed_items(self) -> Iterator[tuple[Any, str, Any, Any]]:
        """The same with the key of each; None for the length of a list."""
        now = self.now()
        if isinstance(now, list):
            if len(now) != len(self.held):
                yield None, f"len({self.path})", len(self.held), len(now)
            pairs: Iterator[tuple[Any, Any, Any]] = (
                (i, a, b) for i, (a, b) in enumerate(zip(self.held, now, strict=False))
            )
            yield from ((i, f"{self.path}[{i}]", a, b) for i, a, b in pairs if not self._same(i, a, b))
            return
        for key in {**self.held, **now}:
            then, new = self.held.get(key, ABSENT), now.get(key, ABSENT)
            if not self._same(key, then, new):
                path = f"{self.path}.{key}" if isinstance(key, str) else f"{self.path}[{_spell_key(key)}]"
                yield key, path, then, new

    def reordered(self) -> bool:
        """Whether a dict has the same keys in another order."""
        now = self.now() if self.ordered else {}
        return self.ordered and list(self.held) != list(now) and self.held.keys() == now.keys()

    def _same(self, key: Any, then: Any, now: Any) -> bool:
        return same(then, now) or (key in self.varying_keys and type(then) is type(now))

    def restore(self) -> None:
        """Puts back what the container held (after a refused trace)."""
        container = self.container
        if isinstance(container, list):
            list.__setitem__(container, slice(None), self.held)
            return
        extra = () if isinstance(container, ContentView) else set(self.now()) - set(self.held)
        if isinstance(container, VIEWS):
            for key in extra:
                del container[key]
            container.update(self.held)
            return
        # A dict of a class of its own may refuse to be written to, or do more than that.
        kind = _kind(container)
        for key in list(self.now()) if self.ordered else extra:
            kind.__delitem__(container, key)
        for key, item in self.held.items():
            kind.__setitem__(container, key, item)


def _kind(container: dict[Any, Any]) -> type[dict[Any, Any]]:
    return OrderedDict if isinstance(container, OrderedDict) else dict


def _held(container: dict[Any, Any], keys: tuple[Any, ...] | None) -> dict[Any, Any]:
    """What a dict holds. What its class gives for a key may be made anew each time (transformers' ``ACT2FN``)."""
    if keys is None:
        return dict(_kind(container).items(container))
    return {key: dict.__getitem__(container, key) for key in keys if dict.__contains__(container, key)}


def only_reached(found: Sequence[Snapshot], reached: Sequence[Snapshot]) -> list[Snapshot]:
    """Those of `found` whose containers are among `reached`, which came by fewer ways, with the keys that are there.

    Both hold what is there now. Closure cells and classes are always kept.
    """
    keys: dict[int, set[Any] | None] = {}
    for one in reached:
        place = _place(one.container)
        seen = keys.get(place, set())
        keys[place] = None if one.keys is None or seen is None else {*seen, *one.keys}
    kept = [one for one in found if isinstance(one.container, (CellView, ClassView)) or _place(one.container) in keys]
    return [_under(one, keys.get(_place(one.container))) for one in kept]


def _under(snapshot: Snapshot, keys: set[Any] | None) -> Snapshot:
    if keys is None:
        return snapshot
    keys = keys if snapshot.keys is None else keys & {*snapshot.keys}
    return replace(
        snapshot,
        keys=tuple(sorted(keys)),
        held={key: item for key, item in snapshot.held.items() if key in keys},
        varying_keys=snapshot.varying_keys & keys,
    )


def _place(container: Any) -> int:
    """The same for two views of the same thing."""
    return id(container.thing if isinstance(container, (ContentView, SlotsView)) else container)


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


ABSENT = _Absent()
"""What a container holds under a key that it has not."""


def _spell_key(key: Any) -> str:
    """A key in one line: the values of a tensor are no name."""
    return f"{type(key).__name__}{list(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)


def same(a: Any, b: Any) -> bool:
    """Whether a trace made with `a` still means the same with `b`: scalars by value and type, the rest by identity."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, SCALARS):
        return not hasattr(a, "__dict__") and (bool(a == b) or (a != a and b != b))
    if isinstance(a, (tuple, frozenset, torch.Size)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, types.MethodType):
        return a.__self__ is b.__self__ and a.__func__ is b.__func__
    if isinstance(a, weakref.ReferenceType):  # two whose object is gone give the same None
        return a() is b() and a.__callback__ is b.__callback__
    return False
