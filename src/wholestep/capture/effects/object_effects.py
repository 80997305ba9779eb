"""Dicts, tuples, objects and plain values that a step puts into objects of the user's: ``self.logs = {"loss": loss}``,
``self.output = model(x)``, ``self.last = loss.item()`` where None was.

What is no tensor (`capture/effects/tensor_effects.py`) and no number that was one before
(`capture/scalars/counters.py`) is a result of the step like what it returns, and put there anew behind every call.
Which places those are a first trace shows; the next one takes what stands there. What stood there before a call is a
constant of the trace, unless nobody looks at it: a trace in which it cannot be looked at says so.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from wholestep.capture.python import tree_util
from wholestep.capture.python.container_views import ClassView, ContentView
from wholestep.capture.python.snapshot import ABSENT, AnyMatching, Location, Snapshot
from wholestep.capture.scalars.counters import ScalarLocation, identity, scalar_locations, write_at
from wholestep.capture.scalars.opaque_value import OpaqueValue


def identities(spots: Iterable[Location]) -> set[Hashable]:
    """The same for the same place, however it was reached."""
    return {(identity(container), key) for container, key in spots}


def recordable_locations(
    watch: Snapshot, key: Any, path: str, pair: tuple[Any, Any]
) -> list[Location] | list[ScalarLocation]:
    """The spot, or the places of numbers; none for what can be left in no way. `pair`: what was there, and is there."""
    container, now = watch.container, pair[1]
    if key is None or isinstance(container, (ClassView, ContentView)) or now is ABSENT:
        return []
    if places := scalar_locations(container, key, path, pair):
        return places
    kinds = (torch.Tensor, *tree_util.SCALARS)
    try:
        leaves = tree_util.flatten(now)[0]
    except RecursionError:  # objects that hold each other
        return []
    is_new = not isinstance(now, torch.Tensor) and not any(isinstance(one, nn.Parameter) for one in leaves)
    return [(container, key)] if is_new and all(isinstance(one, kinds) for one in leaves) else []


class ObjectEffects:
    """Those that one trace takes."""

    def __init__(self, snapshots: Sequence[Snapshot], leaving: Collection[Hashable], hidden: bool) -> None:
        """`leaving`: `identities` of their spots. `hidden`: what stands there cannot be looked at before."""
        found = {
            (identity(watch.container), key): (watch.container, key, one)
            for watch in (snapshots if leaving else ())
            if not isinstance(watch.container, (ClassView, ContentView))
            for key, one in _of(watch, leaving)
        }
        self._found = list(found.values())
        self.hides = hidden and any(holds_value((container, key)) for container, key, _ in self._found)
        """Whether something is hidden."""
        self.spots: list[Location] = []
        """Where results go, once they are taken."""

    def hide(self) -> None:
        """At the beginning of the trace."""
        for container, key, _ in self._found if self.hides else ():
            if holds_value((container, key)):
                write_at(container, key, OpaqueValue("The step looks at what it replaces."))

    def take(self, result: Any) -> Any:
        """At its end: what the step gives, with what it leaves, in the place of which then stands again what did."""
        values = []
        places = {
            identity(one): {key: place for place, key in enumerate(one)}
            for one, _, _ in self._found
            if type(one) is dict
        }
        self._found.sort(key=lambda found: places.get(identity(found[0]), {}).get(found[1], 0))  # keys in their order
        for container, key, then in self._found:
            now = _held(container, key)
            if now is not then and type(now) is not OpaqueValue:
                self.spots.append((container, key))
                values.append(_answered(now))
            self._put_back(container, key, then, now)
        return (result, values) if self.spots else result

    @staticmethod
    def _put_back(container: Any, key: Any, then: Any, now: Any) -> None:
        if then is not ABSENT:
            write_at(container, key, then)
        elif now is not ABSENT:
            del container[key]


def _answered(thing: Any) -> Any:
    """A nest with a bool in the place of what Python would only now ask of a number: that is asked at every call."""
    leaves, spec = tree_util.flatten(thing)
    if not any(isinstance(leaf, torch.SymBool) for leaf in leaves):
        return thing
    return tree_util.unflatten([bool(leaf) if isinstance(leaf, torch.SymBool) else leaf for leaf in leaves], spec)


def _of(watch: Snapshot, leaving: Collection[Hashable]) -> list[tuple[Any, Any]]:
    number = identity(watch.container)
    keys = [one[1] for one in leaving if isinstance(one, tuple) and one[0] == number]
    return [(key, _held(watch.container, key)) for key in keys]


def _held(container: Any, key: Any) -> Any:
    try:
        return container[key]
    except (KeyError, IndexError, AttributeError, ValueError):
        return ABSENT


def holds_value(spot: Location) -> bool:
    """Whether anything but None is there."""
    held = _held(*spot)
    return held is not None and held is not ABSENT


def in_mixed_dicts(tensors: Iterable[Location], objects: Iterable[Location]) -> list[Location]:
    """Those of `tensors` that are new keys in a dict which also gets new keys for `objects`. Each kind is put there by
    itself behind a call, and so in another order; as objects all of them are put there in order."""
    added = [
        [(one, key) for one, key in spots if isinstance(one, dict) and key not in one] for spots in (tensors, objects)
    ]
    mixed = {identity(container) for container, _ in added[1]}
    return [spot for spot in added[0] if identity(spot[0]) in mixed]


def relax_snapshots(snapshots: Iterable[Snapshot], spots: Iterable[Location]) -> None:
    """Has watches take whatever stands in these spots, if something stood there while tracing."""
    free = identities(spots)
    for watch in snapshots:
        for key in list(range(len(watch.held)) if isinstance(watch.held, list) else watch.held):
            if (identity(watch.container), key) in free and watch.held[key] is not None:
                watch.held[key] = AnyMatching(lambda now: now is not None and now is not ABSENT)
