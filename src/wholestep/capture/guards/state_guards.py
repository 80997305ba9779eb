"""Guards of modes of torch, of containers, and of the tensors of the state."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch

from wholestep.capture.guards.fast_guards import MODES, TENSORS, VERSIONED
from wholestep.capture.guards.guards import Call, Guard
from wholestep.capture.guards.tensor_layout import describe, difference, short_text
from wholestep.capture.python.snapshot import Snapshot, same
from wholestep.capture.reach.arguments import ArgumentPath
from wholestep.capture.reach.train_state import Slot
from wholestep.capture.scalars.varying_numbers import VaryingValue, identity, scalar_location
from wholestep.util.torch_switches import torch_modes


@dataclass(frozen=True, slots=True)
class ModeGuard(Guard):
    """Global switches of torch that change what a trace means.

    `Modes` of `capture/native/state_guard.h` notices that one has changed: one that is not there, too, goes unseen.
    """

    modes: tuple[tuple[str, Any], ...]

    def why_not(self, call: Call) -> str | None:
        if MODES not in call.changed or self.modes == (now := torch_modes()):
            return None
        return "; ".join(f"{a[0]} was {a[1]}, is {b[1]}" for a, b in zip(self.modes, now, strict=True) if a != b)


@dataclass(frozen=True, slots=True)
class ContainerGuard(Guard):
    """What dicts, lists, closure cells and other containers hold."""

    snapshots: tuple[Snapshot, ...]
    """By number those of which the native guard tells."""
    opaque: tuple[Snapshot, ...]
    """Those of which it cannot, compared at every call."""
    of_user: tuple[Snapshot, ...]
    """Those of both that may hold numbers and tensors which the user exchanges between calls."""

    def why_not(self, call: Call) -> str | None:
        for snapshot in self._touched(call.changed):
            for path, then, now in snapshot.changes():
                return f"{path} was {short_text(then)}, is {short_text(now)}"
            if snapshot.reordered():
                return f"the keys of {snapshot.path} stand in another order"
        return None

    def _touched(self, changed: tuple[int, ...]) -> Iterator[Snapshot]:
        numbers = sorted(number for number in changed if 0 <= number < len(self.snapshots))
        for snapshot in (*(self.snapshots[number] for number in numbers), *self.opaque):
            if not _untouched(snapshot):
                yield snapshot

    def changed_containers(self, changed: tuple[int, ...]) -> Iterator[Snapshot]:
        for snapshot in self._touched(changed):
            if snapshot.reordered() or next(snapshot.changes(), None) is not None:
                yield snapshot

    def varying_values(self, leaves: Mapping[ArgumentPath, Any]) -> Iterator[VaryingValue]:
        for snapshot, key, path, then, now in self._changed_items():
            place = scalar_location(snapshot.container, key, path, (then, now))
            if place is not None and not same(then, now):
                yield place

    def exchanged_tensors(self) -> Iterator[tuple[Hashable, str, torch.Tensor]]:
        for snapshot, key, path, then, now in self._changed_items():
            if isinstance(then, torch.Tensor) and isinstance(now, torch.Tensor) and describe(then) == describe(now):
                yield (identity(snapshot.container), key), path, now

    def _changed_items(self) -> Iterator[tuple[Snapshot, Any, str, Any, Any]]:
        for snapshot in self.of_user:
            if not _untouched(snapshot):
                items = snapshot.changed_items()
                yield from ((snapshot, *item) for item in items if item[0] is not None)  # None: a list's length


def _untouched(snapshot: Snapshot) -> bool:
    """Whether a dict holds the very objects it held: the usual case, found sooner than by `Snapshot.changes`."""
    now, then = snapshot.container, snapshot.held
    if type(now) not in VERSIONED or len(now) != len(then):
        return False
    return all(map(is_, now.values(), then.values())) and all(map(is_, now, then))


@dataclass(frozen=True, slots=True)
class HookGuard(Guard):
    """Hooks of parameters."""

    hooks: tuple[tuple[Slot, tuple[Any, ...]], ...]

    def why_not(self, call: Call) -> str | None:
        for slot, then in self.hooks if TENSORS in call.changed else ():
            now = hooks_of(slot.tensor)
            if len(then) != len(now) or not all(map(same, now, then)):
                return f"a hook of {slot.name} was added or removed"
        return None


def hooks_of(param: torch.Tensor) -> tuple[Any, ...]:
    """The hooks that autograd runs on the gradient of a parameter."""
    return (*(param._backward_hooks or {}).values(), *(param._post_accumulate_grad_hooks or {}).values())


@dataclass(frozen=True, slots=True)
class LayoutGuard(Guard):
    """Layouts of the tensors of the state."""

    layouts: tuple[tuple[Slot, tuple[Any, ...]], ...]

    def why_not(self, call: Call) -> str | None:
        for slot, then in self.layouts if TENSORS in call.changed else ():
            if (now := describe(slot.tensor)) != then:
                return difference(slot.name, then, now)
        return None


@dataclass(frozen=True, slots=True)
class GradientGuard(Guard):
    """Whether parameters have a gradient at entry, and of which kind."""

    kinds: tuple[tuple[Slot, tuple[Any, ...]], ...]
    """Parameters of which it matters, with the `gradient_kind` that each had."""

    def why_not(self, call: Call) -> str | None:
        for slot, then in self.kinds if TENSORS in call.changed else ():
            now = gradient_kind(slot.tensor.grad)
            if bool(then) != bool(now):
                was, is_now = ("a", "none") if then else ("no", "one")
                return f"{slot.name} had {was} gradient at entry, now it has {is_now}"
            if then != now:
                return f"the gradient of {slot.name} at entry was {_spell_kind(then)}, is {_spell_kind(now)}"
        return None


def gradient_kind(grad: torch.Tensor | None) -> tuple[Any, ...]:
    """Type, dtype, layout and device of a gradient; empty for none. Its shape is that of the parameter."""
    return (type(grad), grad.dtype, grad.layout, grad.device) if grad is not None else ()


def _spell_kind(kind: tuple[Any, ...]) -> str:
    return ", ".join(one.__name__ if isinstance(one, type) else str(one).removeprefix("torch.") for one in kind)
