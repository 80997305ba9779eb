"""What a call does after the run of its graph: frozen records, applied once each, in order.

The graph writes to parameters and buffers itself. What is left is to put its outputs where Python looks for them:
gradients, new state of optimizers, and the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from wholestep.capture.python import tree_util
from wholestep.capture.reach.traced_inputs import StateView
from wholestep.capture.wrappers import ddp

Holder = Callable[[], dict[Any, Any]]
"""Gives the dict in which an optimizer keeps something, which it may replace between calls."""


@dataclass(slots=True)
class CallOutcome:
    """What is there of one call after the run of its graph."""

    outputs: Sequence[Any]
    """Of the program; then, if the step returns some, gradients that parameters had when the call began."""
    result: Any = None


class Effect(Protocol):
    """One thing that a call does after the run of its graph."""

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
        if any(grad._is_view() for grad in grads):
            grads = self._without_bases(call, grads)
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad

    @staticmethod
    def _without_bases(call: CallOutcome, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients, none of them a view, since eager code leaves none: ``grad.detach_()`` refuses views. A result
        that is a gradient stays the same object."""
        plain = {id(grad): grad.detach() for grad in grads if grad._is_view()}
        call.outputs = [plain.get(id(one), one) for one in call.outputs]
        return [plain.get(id(grad), grad) for grad in grads]


@dataclass(frozen=True, slots=True)
class SetOptimizerState:
    """What the graph creates for optimizers, and under which key it goes."""

    entries: tuple[tuple[Holder, Any], ...]
    first: int
    """The first of the STATE outputs."""

    def apply(self, call: CallOutcome) -> None:
        """See `Effect`."""
        made = call.outputs[self.first : self.first + len(self.entries)]
        for (holder, key), value in zip(self.entries, made, strict=True):
            holder()[key] = value


@dataclass(frozen=True, slots=True)
class SetRequiresGrad:
    """What the step freezes and thaws: leaves of autograd, each with what its ``requires_grad`` is after the call."""

    flags: tuple[tuple[torch.Tensor, bool], ...]

    def apply(self, call: CallOutcome) -> None:
        """See `Effect`."""
        for tensor, requires_grad in self.flags:
            tensor.requires_grad = requires_grad


@dataclass(frozen=True, slots=True)
class NoteForward:
    """A DistributedDataParallel whose last forward in the call was another than the one before it: see `ddp`."""

    wrapper: DistributedDataParallel
    is_awaited: bool

    def apply(self, call: CallOutcome) -> None:
        """See `Effect`."""
        ddp.set_awaited(self.wrapper, self.is_awaited)


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
    """The same in every call; None where an output stands."""
    outputs: tuple[tuple[int, int], ...]
    """(leaf, output) pairs."""
    views: tuple[tuple[int, StateView, torch.Tensor], ...] = ()
    """Leaves that are views of state, each with the tensor of the state."""

    @property
    def is_first_output(self) -> bool:
        """Whether the result is the first output itself, as a loss mostly is."""
        return self.spec.type is None and self.outputs == ((0, 0),) and len(self.leaves) == 1

    def apply(self, call: CallOutcome) -> None:
        """See `Effect`."""
        leaves = list(self.leaves)
        for leaf, output in self.outputs:
            leaves[leaf] = call.outputs[output]
        for leaf, view, tensor in self.views:
            leaves[leaf] = view.of(tensor)
        call.result = tree_util.unflatten(leaves, self.spec)
