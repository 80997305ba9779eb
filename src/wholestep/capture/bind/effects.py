"""What a call does behind the run of its graph: frozen records, applied once each, in order.

The graph writes to parameters and buffers itself. What is left is to put its outputs where Python looks for them:
gradients, new state of optimizers, the result, and what the step leaves in objects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from wholestep.capture.effects.argument_effects import ContainerWrite, write_containers
from wholestep.capture.effects.tensor_effects import Mirror, write_locations
from wholestep.capture.python import tree_util
from wholestep.capture.python.snapshot import Location
from wholestep.capture.scalars.counters import Counter

Holder = Callable[[], dict[Any, Any]]
"""Gives the dict in which an optimizer keeps something, which it may replace between calls."""


@dataclass(slots=True)
class CallOutcome:
    """What is there of one call behind the run of its graph."""

    outputs: Sequence[Any]
    """Of the program; then, if the step returns some, gradients that parameters had when the call began."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    leaves: list[Any] = field(default_factory=list)
    """Of the result, then of what the step leaves in objects."""
    result: Any = None


class Effect(Protocol):
    """One thing that a call does behind the run of its graph."""

    def apply(self, call: CallOutcome) -> None:
        """Does it."""


@dataclass(frozen=True, slots=True)
class ClearGradients:
    """Parameters whose ``.grad`` is None after the call and was not before it."""

    params: tuple[torch.Tensor, ...]

    def apply(self, call: CallOutcome) -> None:
        """See `Effect`."""
        for param in self.params:
            param.grad = None


@dataclass(frozen=True, slots=True)
class SetGradients:
    """Parameters that get a new ``.grad``, in the order of the GRAD outputs."""

    params: tuple[torch.Tensor, ...]
    first: int
    """The first of these outputs."""

    def apply(self, call: CallOutcome) -> None:
        """See `Effect`."""
        grads = call.outputs[self.first : self.first + len(self.params)]
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad


@dataclass(frozen=True, slots=True)
class SetOptimizerState:
    """What the graph creates for optimizers: where it goes, and whether it is a number of Python."""

    entries: tuple[tuple[Holder, Any, bool], ...]
    first: int
    """The first of the STATE outputs."""

    def apply(self, call: CallOutcome) -> None:
        """See `Effect`."""
        made = call.outputs[self.first : self.first + len(self.entries)]
        for (holder, key, is_number), value in zip(self.entries, made, strict=True):
            holder()[key] = value.item() if is_number else value


@dataclass(frozen=True, slots=True)
class WriteValue:
    """A plain value that the step leaves with an optimizer."""

    holder: Holder
    key: Any
    value: Any

    def apply(self, call: CallOutcome) -> None:
        """See `Effect`."""
        self.holder()[self.key] = self.value


@dataclass(frozen=True, slots=True)
class CountSchedulerCalls:
    """A scheduler that the step calls counts that for its warnings."""

    scheduler: Any
    count: int

    def apply(self, call: CallOutcome) -> None:
        """See `Effect`."""
        self.scheduler._step_count += self.count


@dataclass(frozen=True, slots=True)
class WriteNumber:
    """A number of Python that the step changes."""

    counter: Counter

    def apply(self, call: CallOutcome) -> None:
        """See `Effect`."""
        self.counter.store()


@dataclass(frozen=True, slots=True)
class UpdateMirror:
    """What the step has written to a tensor of the graph stands where the user has its own."""

    mirror: Mirror

    def apply(self, call: CallOutcome) -> None:
        """See `Effect`."""
        self.mirror.give()


@dataclass(frozen=True, slots=True)
class MarkStepped:
    """Schedulers look before they warn at whether an optimizer has stepped. Nobody takes that back: once is enough."""

    optimizer: Optimizer

    def apply(self, call: CallOutcome) -> None:
        """See `Effect`."""
        self.optimizer._opt_called = True  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class BuildResult:
    """What the step returns, from its leaves."""

    spec: tree_util.TreeSpec
    leaves: tuple[Any, ...]
    """The same in every call; None where one of the next two says what stands there."""
    outputs: tuple[tuple[int, int], ...]
    """(leaf, output) pairs."""
    mirrors: tuple[tuple[int, Mirror], ...]
    """(leaf, mirror) pairs: the leaf is what stands behind the call where the mirror says."""

    @property
    def is_first_output(self) -> bool:
        """Whether the result is the first output itself, as a loss mostly is."""
        return self.spec.type is None and self.outputs == ((0, 0),) and len(self.leaves) == 1

    def apply(self, call: CallOutcome) -> None:
        """See `Effect`."""
        call.leaves = leaves = list(self.leaves)
        for leaf, output in self.outputs:
            leaves[leaf] = call.outputs[output]
        for leaf, mirror in self.mirrors:
            leaves[leaf] = mirror.standing()
        call.result = tree_util.unflatten(leaves[: self.spec.num_leaves], self.spec)


@dataclass(frozen=True, slots=True)
class WriteTensors:
    """Tensors that the step leaves in objects: the last leaves, which it does not return."""

    locations: tuple[Location, ...]

    def apply(self, call: CallOutcome) -> None:
        """See `Effect`."""
        write_locations(self.locations, call.leaves[-len(self.locations) :])


@dataclass(frozen=True, slots=True)
class WriteObjects:
    """Dicts, lists and objects that the step leaves in others. The result is a pair of what it returns and these."""

    locations: tuple[Location, ...]

    def apply(self, call: CallOutcome) -> None:
        """See `Effect`."""
        call.result, objects = call.result
        write_locations(self.locations, objects)


@dataclass(frozen=True, slots=True)
class WriteArguments:
    """What the step writes to containers among its arguments. The result is a pair of what it returns and that."""

    writes: tuple[ContainerWrite, ...]

    def apply(self, call: CallOutcome) -> None:
        """See `Effect`."""
        call.result, things = call.result
        write_containers(self.writes, (call.args, call.kwargs), things)
