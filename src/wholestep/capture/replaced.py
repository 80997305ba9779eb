"""Tensors that a step puts into objects of the user's: ``self.last = loss``, what a hook keeps in a dict.

Such tensors are results of the graph, and stand behind every call where the step puts them: new ones each time, so that
whoever keeps one keeps its values. What stood there before is not looked at, so any tensor of its kind may stand there.

One that the step reads before it puts another in its place is state, as a buffer is: it stays, and takes the values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx as fx
from torch import Tensor, nn

from wholestep.capture.counters import identity
from wholestep.capture.host import running_tracer
from wholestep.capture.scene import Scene
from wholestep.capture.views import CellView, ClassView, ContentView, SlotsView
from wholestep.capture.watch import ABSENT, AnyOf, Watch

Spot = tuple[Any, Any]
"""A container and a key in it."""


@dataclass(frozen=True, slots=True)
class _Change:
    watch: Watch
    key: Any
    then: Any
    now: Tensor


class Replaced:
    """Looks at the containers of a scene at the end of a trace."""

    def __init__(self, scene: Scene) -> None:
        self._watches, self._state = scene.found.watches, scene.state
        modules = [module for _, top in scene.found.modules.values() for module in top.modules()]
        skipped = [held for one in modules for held in (one._parameters, one._buffers, one._modules)]
        self._skipped = {*map(id, skipped), *(id(vars(slot.tensor)) for slot in scene.state.slots)}

    def take(self, results: Sequence[Any]) -> tuple[list[Any], list[Spot]]:
        """In the trace: what the step returns, and behind that what it leaves, with the spots, where then stands again
        what stood there before. `results`: what the step returns."""
        changes, index = list(self._changes()), self._state.index
        elsewhere = {*map(id, results), *(id(one.now) for one in changes)}
        placeholders: list[fx.Node] = running_tracer().graph.find_nodes(op="placeholder")

        def goes(one: _Change) -> bool:
            slot = index.get(id(one.then))
            unread = slot is not None and not placeholders[slot].users and id(one.then) not in elsewhere
            return self._may_take(one) and (unread or one.then is None or one.then is ABSENT)

        stays = {id(one.then) for one in changes if self._state.takes(one.then, one.now) and not goes(one)}
        leaves, spots = [leaf.clone() if id(leaf) in stays else leaf for leaf in results], []
        for one in changes:
            is_new = id(one.now) not in index
            if goes(one) and (is_new or id(one.now) in stays):
                _put(one.watch.container, one.key, one.then)
                leaves.append(one.now if is_new else one.now.clone())
                spots.append((one.watch.container, one.key))
        return leaves, spots

    def write(self) -> None:
        """In the trace: gives tensors of the state the values of what stands in their places, where they then stand."""
        found = [one for one in self._changes() if self._state.takes(one.then, one.now)]
        self._state.write([(one.then, one.now) for one in found])
        for one in found:
            one.watch.put_back(one.now, one.then)

    def _changes(self) -> Iterator[_Change]:
        for watch in self._watches:
            for key, _, then, now in list(watch.changed_items()):
                if isinstance(now, Tensor):
                    yield _Change(watch, key, then, now)

    def _may_take(self, one: _Change) -> bool:
        """Whether a tensor may be left in a spot behind every call."""
        container = one.watch.container
        special = isinstance(container, (ClassView, ContentView)) or id(container) in self._skipped
        unset = isinstance(container, CellView) and one.then is ABSENT
        return not (special or unset or one.key is None or isinstance(one.now, nn.Parameter))


def loosen(
    watches: Collection[Watch], spots: Collection[Spot], like: Callable[[Tensor], Callable[[Any], bool]]
) -> None:
    """Has watches take any tensor that is like the one that was there while tracing, and none of them keep that one."""
    keys = {(identity(container), key) for container, key in spots}
    for watch in watches:
        for key in list(range(len(watch.held)) if isinstance(watch.held, list) else watch.held):
            if (identity(watch.container), key) in keys and isinstance(watch.held[key], Tensor):
                watch.held[key] = AnyOf(like(watch.held[key]))


def put(spots: Collection[Spot], values: Collection[Tensor]) -> None:
    """Behind a call: leaves the tensors where they belong."""
    for (container, key), value in zip(spots, values, strict=True):
        _put(container, key, value)


def _put(container: Any, key: Any, value: Any) -> None:
    if value is ABSENT:
        del container[key]
    elif isinstance(container, (CellView, SlotsView)):
        container.update({key: value})
    else:
        container[key] = value
