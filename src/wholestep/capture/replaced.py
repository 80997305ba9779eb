"""Tensors that a step puts into objects of the user's: ``self.last = loss``, what a hook keeps in a dict.

Such tensors are results of the graph, and stand behind every call where the step puts them: new ones each time, so that
whoever keeps one keeps its values. What stood there before is not looked at, so any tensor of its kind may stand there.

One that the step reads before it puts another in its place (an average, a counter) is state of the graph, which writes
the new values over the old ones. So the graph has a tensor of its own, and what stands in the place is a copy, a new
one behind every call (`Mirror`). Where the same tensor stands in several places, ``self.a = self.b = zeros``, the step
leaves new ones as above, and is traced again: from then on they are several tensors.

Buffers of modules stay where they are and take the values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor, nn

from wholestep.capture.counters import identity
from wholestep.capture.host import running_tracer
from wholestep.capture.scene import Scene
from wholestep.capture.views import CellView, ClassView, ContentView, SlotsView
from wholestep.capture.watch import ABSENT, AnyOf, Watch
from wholestep.errors import CaptureError
from wholestep.program.program import InputKind

Spot = tuple[Any, Any]
"""A container and a key in it."""


@dataclass(slots=True, kw_only=True)
class Left:
    """What a step leaves in objects."""

    spots: list[Spot] = field(default_factory=list)
    """Where its last results go."""
    shared: set[int] = field(default_factory=set)
    """Those of them by number whose tensor before the call stands elsewhere, too, so that it has to be that one."""
    mirrored: list[tuple[int, Spot]] = field(default_factory=list)
    """Slots that the graph reads and writes, and where copies of them stand between calls."""


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

    def take(self, results: Sequence[Any]) -> tuple[list[Any], Left]:
        """In the trace: what the step returns, and behind that what it leaves, with the spots, where then stands again
        what stood there before. `results`: what the step returns."""
        changes, index, left = list(self._changes()), self._state.index, Left()
        elsewhere = {*map(id, results), *(id(one.now) for one in changes)}
        placeholders: list[fx.Node] = running_tracer().graph.find_nodes(op="placeholder")
        holders = self._holders() if changes else Counter()

        def is_shared(one: _Change) -> bool:
            return holders[id(one.then)] > 1 and id(one.then) in index and self._may_take(one)

        def goes(one: _Change) -> bool:
            slot = index.get(id(one.then))
            unread = slot is not None and not placeholders[slot].users and id(one.then) not in elsewhere
            return self._may_take(one) and (unread or one.then is None or one.then is ABSENT or is_shared(one))

        stays = {id(one.then) for one in changes if self._state.takes(one.then, one.now) and not goes(one)}
        leaves = [leaf.clone() if id(leaf) in stays else leaf for leaf in results]
        for one in changes:
            spot, is_new = (one.watch.container, one.key), id(one.now) not in index
            if goes(one) and (is_new or id(one.now) in stays):
                _put(*spot, one.then)
                leaves.append(one.now if is_new else one.now.clone())
                if is_shared(one):
                    left.shared.add(len(left.spots))
                left.spots.append(spot)
            elif id(one.then) in stays and self._may_take(one) and self._is_loose(one.then):
                left.mirrored.append((index[id(one.then)], spot))
        return leaves, left

    def _is_loose(self, tensor: Tensor) -> bool:
        return self._state.slots[self._state.index[id(tensor)]].kind is InputKind.TENSOR

    def _holders(self) -> Counter[int]:
        """In how many places of containers each tensor stood when the trace began, by id."""
        found = {identity(watch.container): watch.held for watch in self._watches}
        held = (one if isinstance(one, list) else one.values() for one in found.values())
        return Counter(id(one) for items in held for one in items if isinstance(one, Tensor))

    def write(self) -> None:
        """In the trace: gives tensors of the state the values of what stands in their places, where they then stand.

        Raises CaptureError for one that stands elsewhere, too, where it would have those values as well.
        """
        found = [one for one in self._changes() if self._state.takes(one.then, one.now)]
        holders = self._holders() if found else Counter()
        for one in found:
            if holders[id(one.then)] > 1:
                raise CaptureError(
                    f"The step puts another tensor in the place of {self._state.name_of(one.then)}, which stands in "
                    f"{holders[id(one.then)]} places that wholestep cannot tell apart. Give each a tensor of its own "
                    f"(clone it where you make it), or write to it: copy_()."
                )
        self._state.write([(one.then, one.now) for one in found])
        for one in found:
            if self._may_take(one):
                _put(one.watch.container, one.key, one.then)
            else:
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


@dataclass(slots=True)
class Mirror:
    """A tensor of the graph, and the place of the user's where a copy of it stands between calls."""

    tensor: Tensor
    spot: Spot
    _given: tuple[Tensor, int | None] | None = None
    """The copy that stands there since the last call, and its version; None where there is none, or the call failed."""

    def take(self) -> None:
        """Before a call: the tensor has the values of what stands in the place, whoever put or wrote it."""
        container, key = self.spot
        now = container[key]
        if self._given is None or self._given[0] is not now or self._given[1] != _version(now):
            with torch.no_grad():
                self.tensor.copy_(now)
        self._given = None

    def give(self) -> None:
        """Behind a call: a new tensor stands in the place."""
        with torch.no_grad():
            made = self.tensor.clone()
        _put(*self.spot, made)
        # Of tensors that inference mode has made nobody counts who writes them.
        self._given = (made, _version(made)) if not made.is_inference() else None


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


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
