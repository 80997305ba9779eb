"""Records of a captured step: where inputs come from, where outputs go, what a call leaves; as plain values, and live.

A capture gives a program and a `BindingSpec`, in which live objects are numbers. Bound to the context it was made in,
they are a `Captured` step. Bound to a context of another process in which everything has the same place, they are the
same step there, and nothing was traced for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch.fx as fx

from wholestep.capture.bind.binding import Binding
from wholestep.capture.guards.guards import Guards
from wholestep.capture.python import tree_util
from wholestep.capture.python.snapshot import ABSENT
from wholestep.capture.reach.arguments import ArgumentSize
from wholestep.capture.reach.step_context import StepContext
from wholestep.capture.reach.traced_inputs import InputSource
from wholestep.capture.reach.train_state import Address
from wholestep.capture.scalars.varying_numbers import ScalarLocation, identity
from wholestep.errors import CaptureError
from wholestep.ir.dtensor.layouts import DTensorLayout
from wholestep.ir.program import Program


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
    """An output that an optimizer keeps."""

    address: Address


OutputSink = ResultSink | GradSink | StateSink


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReads:
    """What a trace depends on, besides what the guards of its objects hold."""

    kept_grads: frozenset[int]
    """Slots of parameters whose ``.grad`` is the tensor that it was when the call began."""
    stepped: frozenset[int]
    """Slots of parameters that had a gradient when an optimizer stepped."""
    uses_grads: bool
    """Whether a backward has left gradients, on top of those that were there, or Python has looked at some."""
    argument_grads: tuple[int, ...]
    """Leaves of the arguments whose gradient Python has looked at. They had none before the call."""
    written: frozenset[int]
    """Slots that the graph writes to."""
    opaque_leaves: tuple[int, ...]
    """Leaves of the arguments that may be any text."""
    scalars: tuple[tuple[int, ScalarLocation], ...]
    """Numbers that vary, each without its container, which is the one with this number in the context."""
    predicates: tuple[fx.GraphModule, list[bool], list[str]] | None
    """What Python asked of numbers, and the answers that the trace went by."""
    predicate_inputs: tuple[tuple[str, InputSource], ...]
    """The names by which predicates know the inputs of the trace."""
    storages: tuple[tuple[InputSource, int], ...]
    """Inputs whose storage has to have so many bytes."""
    foreign: int
    """How many tensors of nobody the graph holds: they are constants of this process."""
    held_arguments: int
    """How many tensors of the arguments it has read where objects hold them, so that they are state."""
    environment: Mapping[str, str]
    """Variables of the environment that the trace read."""
    tensor_attributes: bool
    """Whether Python has asked tensors for attributes that they do not have."""
    attributes: tuple[str, ...]
    """Attributes of objects that it used and that no code names; classes of objects that it read whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BindingSpec:
    """How a program hangs together with the objects of a context, as plain values that can be saved."""

    inputs: tuple[InputSource, ...]
    """Per input of the program."""
    outputs: tuple[OutputSink, ...]
    """Per USER, GRAD and STATE output of the program, in its order. After them come its WRITE outputs."""
    layouts: tuple[DTensorLayout | None, ...]
    """Per output the DTensor of which it is this rank's part; None for a plain tensor."""
    sees_parts: bool
    """Whether the program takes this rank's parts of DTensors."""
    result_spec: tree_util.TreeSpec
    """Of what the step returns."""
    leaves: tuple[Any, ...]
    """Leaves of the result: `StateRef`, `StateView`, `ArgumentRef`, or a value; None where an output fills it."""
    forwards: tuple[tuple[int, bool], ...]
    """Numbers of the DistributedDataParallel whose forwards ran, with whether a reduction follows the last one."""
    stepped_optimizers: tuple[int, ...]
    """Those that the step steps, by number: schedulers look at that before they warn."""
    requires_grad: tuple[tuple[int, bool], ...]
    """Slots of the state whose ``requires_grad`` the step leaves changed, with what it is then."""
    kept_graph: str
    """The shape of a result through whose graph of autograd a backward could still go; empty if there is none."""
    reads: TraceReads


@dataclass(frozen=True, slots=True)
class Setup:
    """Plain attributes that a step sets before it looks at them, such as ``model.eval()`` does: what they hold between
    two calls decides nothing."""

    places: tuple[tuple[dict[str, Any], str, Any], ...]
    """Attributes of an object, the name of one, and what the step sets."""

    def repeat(self) -> Callable[[], None] | None:
        """Sets what the step would set. Gives what puts back what was there; None if all is set."""
        found = [(held, name, held.get(name, ABSENT)) for held, name, _ in self.places]
        if all(was is wanted for (*_, was), (*_, wanted) in zip(found, self.places, strict=True)):
            return None
        for held, name, wanted in self.places:
            held[name] = wanted

        def undo() -> None:
            for held, name, was in found:
                if was is ABSENT:
                    del held[name]
                else:
                    held[name] = was

        return undo


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
    setup: Setup | None = None
    """What it set, where that is all, and nothing that it had looked at."""
    constant_sizes: Mapping[ArgumentSize, str | None] = field(default_factory=dict)
    """Sizes of arguments that were to be symbols and have become constants, each with who wanted a number. None where
    nobody did, and a condition of this trace holds for one size alone: the next may be a symbol in another trace."""
    undo: Callable[[], None]
    """Removes the optimizer state that was created for this step, and what its first run set up: for a capture that is
    not used, and for when the first call fails after it."""

    @property
    def program(self) -> Program:
        """The program, as it was captured."""
        return self.source()

    def check_results(self, may_lose_graphs: bool) -> None:
        """Raises CaptureError where a backward could go on through the graph of a result, which no program keeps.
        Nothing is left of the trace then."""
        if self.spec.kept_graph and not may_lose_graphs:
            self.undo()
            raise CaptureError(
                f"The step returns a tensor {self.spec.kept_graph} with its graph of autograd, through which a "
                f"backward can go on after it. Call backward() in the step, compute it under torch.no_grad(), or "
                f"return result.detach()."
            )

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Around the first call: one that fails leaves nothing behind that was not there before it."""
        try:
            yield
        except BaseException:
            self.undo()
            raise


def portable_scalars(scalars: Sequence[ScalarLocation], context: StepContext) -> tuple[tuple[int, ScalarLocation], ...]:
    """Locations of numbers as plain values."""
    known: dict[int, int] = {}
    for number, container in enumerate(context.containers() if scalars else ()):
        known.setdefault(identity(container), number)
    return tuple((known[identity(one.container)], replace(one, container=None)) for one in scalars)


def resolve_scalars(scalars: Sequence[tuple[int, ScalarLocation]], context: StepContext) -> list[ScalarLocation]:
    """The same locations of numbers in another context."""
    containers = context.containers() if scalars else []
    return [replace(one, container=containers[number]) for number, one in scalars]
