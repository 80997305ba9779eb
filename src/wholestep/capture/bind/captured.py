"""Records of a captured step: where inputs come from, where outputs go, what a call leaves; as plain values, and live.

A capture gives a program and a `BindingSpec`, in which live objects are numbers. Bound to the context it was made in,
they are a `Captured` step. Bound to a context of another process in which everything has the same place, they are the
same step there, and nothing was traced for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch.fx as fx

from wholestep.capture.bind.binding import Binding
from wholestep.capture.effects.argument_effects import ContainerWrite
from wholestep.capture.effects.optimizer_effects import StateWrite
from wholestep.capture.effects.tensor_effects import MirrorMode
from wholestep.capture.guards.guards import Guards
from wholestep.capture.python import tree_util
from wholestep.capture.python.snapshot import Location
from wholestep.capture.reach.step_context import StepContext
from wholestep.capture.reach.traced_inputs import InputSource
from wholestep.capture.reach.train_state import Address
from wholestep.capture.scalars.counters import ScalarLocation, identity
from wholestep.ir.program import Program

PortableLocation = tuple[int, Any]
"""A container by its number in the context, and a key in it."""


@dataclass(frozen=True, slots=True)
class StateRef:
    """A leaf of the result that is the tensor of the state in this slot."""

    slot: int


@dataclass(frozen=True, slots=True)
class ResultSink:
    """An output that is a leaf of the result."""

    leaf: int


@dataclass(frozen=True, slots=True)
class GradSink:
    """An output that is the new ``.grad`` of the parameter in this slot."""

    slot: int


@dataclass(frozen=True, slots=True)
class StateSink:
    """An output that an optimizer keeps; a number of Python where `is_number`."""

    address: Address
    is_number: bool


OutputSink = ResultSink | GradSink | StateSink


@dataclass(frozen=True, slots=True)
class KeepTensor:
    """The step leaves a tensor in an object: the last leaves of the result, in order.

    `is_shared`: what stood there stands elsewhere, too, so the guards want that very tensor.
    """

    location: PortableLocation
    is_shared: bool


@dataclass(frozen=True, slots=True)
class KeepObject:
    """The step leaves something that holds tensors or numbers in an object."""

    location: PortableLocation


@dataclass(frozen=True, slots=True)
class MirrorTensor:
    """The graph has a tensor of its own, in this slot, for one that stands in an object between calls."""

    slot: int
    location: PortableLocation
    mode: MirrorMode


@dataclass(frozen=True, slots=True)
class SchedulerCalls:
    """How often the step calls a scheduler, which counts that for its warnings."""

    scheduler: int
    count: int


@dataclass(frozen=True, slots=True)
class OptimizerStepped:
    """The step steps this optimizer, which schedulers look at before they warn."""

    optimizer: int


EffectSpec = (
    KeepTensor | KeepObject | MirrorTensor | StateWrite | SchedulerCalls | OptimizerStepped | ContainerWrite
)  # fmt: skip
Row = TypeVar("Row", bound=EffectSpec)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReads:
    """What a trace depends on, besides what the guards of its objects hold."""

    kept_grads: frozenset[int]
    """Slots of parameters whose ``.grad`` is the tensor that it was when the call began."""
    stepped: frozenset[int]
    """Slots of parameters that had a gradient when an optimizer stepped."""
    written: frozenset[int]
    """Slots that the graph writes to."""
    opaque_leaves: tuple[int, ...]
    """Leaves of the arguments that may be any text."""
    hides: bool
    """Whether nobody looks at what stood before where the step leaves objects."""
    scalars: tuple[tuple[int, ScalarLocation], ...]
    """Numbers that the step changes, each without its container, which is the one with this number in the context."""
    calls_scheduler: bool
    """Whether the step itself calls a scheduler, whose own constants are in its graph then."""
    predicates: tuple[fx.GraphModule, list[bool], list[str]] | None
    """What Python asked of numbers, and the answers that the trace went by."""
    predicate_inputs: tuple[tuple[str, InputSource], ...]
    """The names by which predicates know the inputs of the trace."""
    storages: tuple[tuple[InputSource, int], ...]
    """Inputs whose storage has to have so many bytes."""
    foreign: int
    """How many tensors of nobody the graph holds: they are constants of this process."""
    environment: Mapping[str, str]
    """Variables of the environment that the trace read."""
    attributes: tuple[str, ...]
    """Attributes of objects that it used and that no code names; classes of objects that it read whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BindingSpec:
    """How a program hangs together with the objects of a context, as plain values that can be saved."""

    inputs: tuple[InputSource, ...]
    """Per input of the program."""
    outputs: tuple[OutputSink, ...]
    """Per USER, GRAD and STATE output of the program, in its order. Behind them come its WRITE outputs."""
    result_spec: tree_util.TreeSpec
    """Of what the step returns, in a pair with a list for `KeepObject`, and in one for `ContainerWrite`."""
    leaves: tuple[Any, ...]
    """Leaves of the result, then those of `KeepTensor`: `StateRef`, or a value; None where an output fills it."""
    effects: tuple[EffectSpec, ...]
    """What a call leaves besides gradients and what its optimizers keep."""
    reads: TraceReads

    def effects_of(self, kind: type[Row]) -> list[Row]:
        """The effects of one kind, in order."""
        return [one for one in self.effects if isinstance(one, kind)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A captured step: the program, the objects behind its inputs and outputs, and when it may be used again."""

    source: Callable[[], Program]
    """Gives the program; a saved one is not read before somebody asks for it."""
    binding: Binding
    guards: Guards
    spec: BindingSpec
    settled: bool = True
    """Whether the step changed nothing in its first run. Else the context is one that the step had set up."""
    undo: Callable[[], None]
    """Removes the optimizer state that was created for this step: for when its first call fails after the capture."""

    @property
    def program(self) -> Program:
        """The program, as it was captured."""
        return self.source()

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Around the first call: one that fails leaves no optimizer state behind that was not there before it."""
        try:
            yield
        except BaseException:
            self.undo()
            raise


def portable_scalars(scalars: Sequence[ScalarLocation], context: StepContext) -> tuple[tuple[int, ScalarLocation], ...]:
    """Locations of numbers as plain values."""
    known = _container_numbers(context)
    return tuple((known[identity(one.container)], replace(one, container=None)) for one in scalars)


def portable_locations(locations: Sequence[Location], context: StepContext) -> tuple[PortableLocation, ...]:
    """Locations of objects as plain values."""
    known = _container_numbers(context) if locations else {}
    return tuple((known[identity(container)], key) for container, key in locations)


def resolve_scalars(scalars: Sequence[tuple[int, ScalarLocation]], context: StepContext) -> list[ScalarLocation]:
    """The same locations of numbers in another context."""
    containers = context.containers()
    return [replace(one, container=containers[number]) for number, one in scalars]


def resolve_locations(locations: Sequence[PortableLocation], context: StepContext) -> list[Location]:
    """The same locations of objects in another context."""
    containers = context.containers() if locations else []
    return [(containers[number], key) for number, key in locations]


def _container_numbers(context: StepContext) -> dict[int, int]:
    known: dict[int, int] = {}
    for number, container in enumerate(context.containers()):
        known.setdefault(identity(container), number)
    return known
