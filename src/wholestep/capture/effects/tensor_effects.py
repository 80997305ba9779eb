"""Tensors that a step puts into objects of the user's: ``self.last = loss``, what a hook keeps in a dict.

Such tensors are results of the graph, and stand behind every call where the step puts them: new ones each time, so that
whoever keeps one keeps its values. What stood there before is not looked at, so any tensor of its kind may stand there.

One that the step reads before it puts another in its place (an average, a counter) is state of the graph, which writes
the new values over the old ones. So the graph has a tensor of its own, and what stands in the place is a copy, a new
one behind every call (`Mirror`). So it is with a tensor of the user's that is another one in a later call,
``trainer.batch = ...``, from then on (`capture/retrace_policy.py`): the graph's own takes its values. Where the same
tensor stands in several places, ``self.a = self.b = zeros``, the step leaves new ones as above, and is traced again:
from then on they are several tensors.

Buffers of modules stay where they are and take the values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor, nn

from wholestep.capture.python.container_views import CellView, ClassView, ContentView, SlotsView
from wholestep.capture.python.snapshot import ABSENT, AnyMatching, Location, Snapshot
from wholestep.capture.reach.step_context import StepContext
from wholestep.capture.scalars.counters import identity
from wholestep.capture.scalars.host_scalars import running_tracer
from wholestep.errors import CaptureError
from wholestep.ir.program import InputKind


@dataclass(slots=True, kw_only=True)
class KeptTensors:
    """What a step leaves in objects."""

    spots: list[Location] = field(default_factory=list)
    """Where its last results go."""
    shared: set[int] = field(default_factory=set)
    """Those of them by number whose tensor before the call stands elsewhere, too, so that it has to be that one."""
    mirrored: list[tuple[int, Location, bool]] = field(default_factory=list)
    """Slots that the graph has for itself, where what they mirror stands between calls, and whether the step puts new
    ones there."""


@dataclass(frozen=True, slots=True)
class _Change:
    watch: Snapshot
    key: Any
    then: Any
    now: Tensor


class TensorEffects:
    """Looks at the containers of a scene at the end of a trace."""

    def __init__(self, context: StepContext) -> None:
        self._watches, self._state = context.reachable.snapshots, context.state
        self._rebound = context.rebound_locations
        self._arguments = context.leaves
        grads = (slot.tensor.grad for slot in context.state.params if slot.tensor.grad is not None)
        of_optimizers = (slot.tensor for slot in context.state.of_kind(InputKind.OPTIMIZER))
        self._elsewhere = [id(one) for held in (grads, of_optimizers) for one in held]
        modules = [module for _, top in context.reachable.modules.values() for module in top.modules()]
        skipped = [held for one in modules for held in (one._parameters, one._buffers, one._modules)]
        self._skipped = {*map(id, skipped), *(id(vars(slot.tensor)) for slot in context.state.slots)}

    def take(self, results: Sequence[Any]) -> tuple[list[Any], KeptTensors]:
        """In the trace: what the step returns, and behind that what it leaves, with the spots, where then stands again
        what stood there before. `results`: what the step returns. A slot that is mirrored means what will stand in its
        place behind the call."""
        changes, index, kept = list(self._changes()), self._state.index, KeptTensors()
        holders = self._holders() if changes or self._rebound else Counter()
        free = {
            id(one)
            for one in changes
            if self._may_take(one) and holders[id(one.then)] <= 1 and self._is_unread(one, results, changes)
        }
        stays = self._staying(changes, free, holders)
        kept.mirrored = [(index[id(one)], spot, False) for spot, one in self._moving(changes, holders)]
        replaced = {
            id(one.now): one.then
            for one in changes
            if id(one.then) in stays and self._is_mirrored(one) and id(one.now) not in index
        }
        leaves = [leaf.clone() if id(leaf) in stays else replaced.get(id(leaf), leaf) for leaf in results]
        for one in changes:
            spot = (one.watch.container, one.key)
            if not self._may_take(one):
                continue
            if id(one.then) in stays:
                if self._is_mirrored(one):
                    kept.mirrored.append((index[id(one.then)], spot, True))
            elif id(one) in free or id(one.then) in index:
                _put(*spot, one.then)
                leaves.append(one.now.clone() if id(one.now) in stays else one.now)
                if id(one) not in free:
                    kept.shared.add(len(kept.spots))
                kept.spots.append(spot)
        return leaves, kept

    def _staying(self, changes: Sequence[_Change], free: Collection[int], holders: Mapping[int, int]) -> set[int]:
        """Tensors of the state that take the values of what stands in their places, by id.

        Not those that stand elsewhere, too, nor where a lasting tensor of the state stands now, which then is in two
        places.
        """
        stays = {
            id(one.then)
            for one in changes
            if self._state.takes(one.then, one.now)
            and not (self._may_take(one) and (id(one) in free or holders[id(one.then)] > 1))
        }
        while True:
            gone = {
                id(one.then)
                for one in changes
                if self._may_take(one) and id(one.now) in self._state.index and id(one.now) not in stays
            }
            if stays.isdisjoint(gone):
                return stays
            stays -= gone

    def _moving(self, changes: Sequence[_Change], holders: Mapping[int, int]) -> Iterator[tuple[Location, Tensor]]:
        """Tensors that stand in places where others stood in earlier calls, and that the step leaves there."""
        changed = {(identity(one.watch.container), one.key) for one in changes}
        for watch in self._watches if self._rebound else ():
            for key, one in list(enumerate(watch.held) if isinstance(watch.held, list) else watch.held.items()):
                spot = (identity(watch.container), key)
                moves = spot in self._rebound and spot not in changed and id(one) in self._state.index
                if moves and holders[id(one)] == 1 and self._is_loose(one):
                    yield (watch.container, key), one

    def _is_unread(self, one: _Change, results: Sequence[Any], changes: Sequence[_Change]) -> bool:
        """Whether nothing depends on what stood in a place before. For a tensor that stands nowhere else."""
        if one.then is None or one.then is ABSENT:
            return True
        slot = self._state.index.get(id(one.then))
        placeholders: list[fx.Node] = running_tracer().graph.find_nodes(op="placeholder")
        elsewhere = {*map(id, results), *(id(other.now) for other in changes)}
        return slot is not None and not placeholders[slot].users and id(one.then) not in elsewhere

    def _is_mirrored(self, one: _Change) -> bool:
        """Whether the graph has a tensor of its own for one that takes the values of another one."""
        return self._may_take(one) and self._is_loose(one.then)

    def _is_loose(self, tensor: Tensor) -> bool:
        return self._state.slots[self._state.index[id(tensor)]].kind is InputKind.TENSOR

    def _holders(self) -> Counter[int]:
        """In how many places each tensor stood when the trace began, by id: of containers and of tuples in them, among
        the arguments, as gradients of parameters, and with optimizers."""
        found = {identity(watch.container): watch.held for watch in self._watches}
        held = (one if isinstance(one, list) else one.values() for one in found.values())
        counted = Counter(id(one) for items in held for one in _within(items))
        counted.update(map(id, _within(self._arguments)))
        counted.update(self._elsewhere)
        return counted

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
                one.watch.replace(one.now, one.then)

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


def _within(things: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among things, and in tuples among them."""
    for one in things:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, tuple):
            yield from _within(one)


def relax_snapshots(
    snapshots: Collection[Snapshot], spots: Collection[Location], like: Callable[[Tensor], Callable[[Any], bool]]
) -> None:
    """Has watches take any tensor that is like the one that was there while tracing, and none of them keep that one."""
    keys = {(identity(container), key) for container, key in spots}
    for watch in snapshots:
        for key in list(range(len(watch.held)) if isinstance(watch.held, list) else watch.held):
            if (identity(watch.container), key) in keys and isinstance(watch.held[key], Tensor):
                watch.held[key] = AnyMatching(like(watch.held[key]))


class MirrorMode(Enum):
    """What a step does with what a mirror mirrors."""

    READS = "reads"
    WRITES = "writes"  # to the tensor that stands there
    REPLACES = "replaces"  # by another one


@dataclass(slots=True)
class Mirror:
    """A tensor of the graph, and the place of the user's where what it mirrors stands between calls."""

    tensor: Tensor
    spot: Location
    way: MirrorMode
    _known: tuple[Tensor, int | None] | None = None
    """The tensor with the same values that stood there when a call ended well, and its version."""

    def standing(self) -> Tensor:
        """What stands in the place."""
        container, key = self.spot
        found: Tensor = container[key]
        return found

    def take(self) -> None:
        """Before a call: the tensor has the values of what stands in the place, whoever put or wrote it."""
        now = self.standing()
        if self._known is None or self._known[0] is not now or self._known[1] != _version(now):
            with torch.no_grad():
                self.tensor.copy_(now)
        self._known = _noted(now) if self.way is MirrorMode.READS else None

    def give(self) -> None:
        """Behind a call: what the step has written stands in the place."""
        if self.way is MirrorMode.READS:
            return
        with torch.no_grad():
            now = self.tensor.clone() if self.way is MirrorMode.REPLACES else self.standing().copy_(self.tensor)
        if self.way is MirrorMode.REPLACES:
            _put(*self.spot, now)
        self._known = _noted(now)


def _noted(tensor: Tensor) -> tuple[Tensor, int | None] | None:
    """None for what inference mode has made: nobody counts who writes to it."""
    return None if tensor.is_inference() else (tensor, tensor._version)


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def write_locations(spots: Collection[Location], values: Collection[Tensor]) -> None:
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
