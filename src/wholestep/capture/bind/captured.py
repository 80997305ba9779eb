"""Ties: how a program hangs together with the objects of a scene, by number; and the same with live objects.

A capture gives a program and its ties. Tied to the scene it was made in, they are a `Captured` step; tied to a scene of
another process in which everything has the same place, they are the same step there, and nothing was traced for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch.fx as fx

from wholestep.capture.bind.binding import Binding
from wholestep.capture.effects.argument_effects import ContainerWrite, write_containers
from wholestep.capture.effects.optimizer_effects import StateWrite
from wholestep.capture.effects.tensor_effects import MirrorMode, write_locations
from wholestep.capture.guards.guards import Guards
from wholestep.capture.python import tree_util
from wholestep.capture.python.snapshot import Location
from wholestep.capture.reach.step_context import StepContext
from wholestep.capture.reach.train_state import Address
from wholestep.capture.scalars.counters import ScalarLocation, identity
from wholestep.ir.program import Program


@dataclass(frozen=True, slots=True)
class StateRef:
    """In a result: the tensor of the state in this slot."""

    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BindingSpec:
    """Where a program's inputs come from, where its outputs go, and what its trace depends on.

    Plain values. A *slot* is a place in `TrainState.slots`; the tracer's inputs are the slots, then the numbers of
    parameter groups, the tensors of the arguments, and the ranks.
    """

    kept: tuple[int, ...]
    """Per input of the program its place among the tracer's inputs."""
    result_spec: tree_util.TreeSpec
    results: tuple[Any, ...]
    """Leaves of what the step returns: `StateRef`, or a value as it is; None where the graph fills it."""
    left: tuple[tuple[int, Any], ...]
    """Where the last leaves go, which the step does not return: the number of a container in the scene, and a key."""
    shared: frozenset[int]
    """Those of `left` by number where the very tensor has to stand that stood there, since it stands elsewhere, too."""
    mirrored: tuple[tuple[int, tuple[int, Any], MirrorMode], ...]
    """Slots of tensors that the graph has for itself, and where what they mirror stands between calls, as in `left`."""
    written: frozenset[int]
    """Slots that the graph writes to."""
    result_places: tuple[int, ...]
    """Leaves that the graph fills, in the order of its USER outputs."""
    grads: tuple[int, ...]
    """Slots of parameters that get a new ``.grad``, in the order of the GRAD outputs."""
    kept_grads: frozenset[int]
    """Slots of parameters whose ``.grad`` is the tensor that it was at entry."""
    new_state: tuple[tuple[Address, bool], ...]
    """What the graph creates for optimizers, and whether it is a number in Python."""
    notes: tuple[StateWrite, ...]
    """Plain values that the step leaves with optimizers."""
    opaque_leaves: tuple[int, ...]
    """Leaves of the arguments that are any text."""
    argument_effects: tuple[ContainerWrite, ...]
    """To which containers among the arguments the step writes. If to any, its result is a pair: what it returns, and a
    list of what is new there."""
    object_effects: tuple[tuple[int, Any], ...]
    """Where things go that it leaves in objects, as in `left`. If any, its result is a pair of all that and a list."""
    hides: bool
    """Whether nobody looks at what stood there before."""
    places: tuple[tuple[int, ScalarLocation], ...]
    """Of numbers that the step moves, each without its container, which is the one with this number in the scene."""
    calls_scheduler: bool
    """Whether the step itself calls a scheduler, whose own constants are in its graph then."""
    ticks: tuple[tuple[int, int], ...]
    """Schedulers by number, and how often the step calls them."""
    stepped: frozenset[int]
    """Slots of parameters that had a gradient when an optimizer stepped."""
    stepping: tuple[int, ...]
    """Optimizers that step, by number."""
    slices: tuple[int, int, int]
    """Ends of the USER, GRAD and STATE outputs among the program's outputs."""
    placeholders: tuple[str, ...]
    """Names of the tracer's inputs, by which predicates know them."""
    predicates: tuple[fx.GraphModule, list[bool], list[str]] | None
    storages: tuple[tuple[int, int], ...]
    """Inputs of the tracer whose storage has to have so many bytes."""
    foreign: int
    """How many tensors of nobody the graph holds: they are constants of this process."""
    environment: Mapping[str, str]
    """Variables of the environment that the trace read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A captured step: the program, the objects behind its inputs and outputs, and when it may be used again."""

    source: Callable[[], Program]
    """Gives the program; a saved one is not read before somebody asks for it."""
    binding: Binding
    guards: Guards
    spec: BindingSpec
    object_effects: list[Location]
    """Where things go that the step leaves in objects."""
    settled: bool = True
    """Whether the step changed nothing in its first run. Else the ties are those of a scene that it had set up."""
    undo: Callable[[], None]
    """Removes the optimizer state that was created for this step: for when its first call fails after the capture."""

    @property
    def program(self) -> Program:
        """The program, as it was captured."""
        return self.source()

    def returned(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Behind a call that gave `result`: writes to its arguments and to objects what the step leaves there besides
        tensors. What it returns."""
        if self.object_effects:
            result, left = result
            write_locations(self.object_effects, left)
        if self.spec.argument_effects:
            result, things = result
            write_containers(self.spec.argument_effects, (args, kwargs), things)
        return result

    @property
    def only_returns(self) -> bool:
        """Whether there is nothing to do for `returned`."""
        return not (self.object_effects or self.spec.argument_effects)

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Around the first call: one that fails leaves no optimizer state behind that was not there before it."""
        try:
            yield
        except BaseException:
            self.undo()
            raise


def portable_scalars(places: Sequence[ScalarLocation], context: StepContext) -> tuple[tuple[int, ScalarLocation], ...]:
    """Places as plain values."""
    known: dict[int, int] = {}
    for number, container in enumerate(context.containers()):
        known.setdefault(identity(container), number)
    return tuple((known[identity(place.container)], replace(place, container=None)) for place in places)


def portable_locations(spots: Sequence[Location], context: StepContext) -> tuple[tuple[int, Any], ...]:
    """The same for spots."""
    known = {identity(container): number for number, container in enumerate(context.containers())}
    return tuple((known[identity(container)], key) for container, key in spots)


def resolve_scalars(places: Sequence[tuple[int, ScalarLocation]], context: StepContext) -> list[ScalarLocation]:
    """The same places in another scene."""
    containers = context.containers()
    return [replace(place, container=containers[number]) for number, place in places]


def resolve_locations(numbered: Sequence[tuple[int, Any]], context: StepContext) -> list[Location]:
    containers = context.containers() if numbered else []
    return [(containers[number], key) for number, key in numbered]


def mirrored_locations(spec: BindingSpec, context: StepContext) -> list[Location]:
    return resolve_locations([spot for _, spot, _ in spec.mirrored], context)
