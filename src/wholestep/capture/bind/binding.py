"""The live objects behind a program's inputs, and the effects of a call: filled in before a run, applied after it.

Everything that stays the same between calls is looked up once. A call fills in only the arguments, the numbers of
parameter groups and the gradients that were there when it began.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from wholestep.capture.bind.effects import BuildResult, CallOutcome, Effect
from wholestep.capture.guards import fast_guards
from wholestep.capture.scalars.hyperparameters import Hyperparameter
from wholestep.ir.program import InputKind, Program


@dataclass(frozen=True, slots=True)
class Constant:
    """An input that is the same in every call: a tensor that lives between calls, or the number of a rank."""

    value: torch.Tensor | int


@dataclass(frozen=True, slots=True)
class GroupNumber:
    """An input that is a number of a parameter group, read at every call."""

    hyper: Hyperparameter


@dataclass(frozen=True, slots=True)
class ArgumentLeaf:
    """An input that is a leaf of the arguments."""

    leaf: int


@dataclass(frozen=True, slots=True)
class EntryGrad:
    """An input that is the gradient that a parameter has when the call begins."""

    param: torch.Tensor


LiveInput = Constant | GroupNumber | ArgumentLeaf | EntryGrad
Kind = TypeVar("Kind", bound=LiveInput)
SomeEffect = TypeVar("SomeEffect", bound=Effect)


@dataclass(slots=True, kw_only=True)
class Binding:
    """Where each input of a program comes from and what a call does with its outputs."""

    inputs: tuple[LiveInput, ...]
    """Per input of the program."""
    effects: tuple[Effect, ...]
    once: list[Effect]
    """Effects of the next call alone."""
    returned_grads: tuple[torch.Tensor, ...]
    """Parameters of which the step returns the gradient that they had when the call began."""
    returned_inputs: tuple[int, ...] = ()
    """Inputs that the step returns as they are: arguments to which it has written."""

    def with_constants(self, more: Sequence[torch.Tensor | int]) -> Binding:
        """The same binding for a program with `more` inputs at the end, which are the same in every call."""
        return replace(self, inputs=(*self.inputs, *map(Constant, more)))

    def inputs_of(self, kind: type[Kind]) -> list[tuple[int, Kind]]:
        """The inputs of one kind, each with its place."""
        return [(place, one) for place, one in enumerate(self.inputs) if isinstance(one, kind)]

    def effects_of(self, kind: type[SomeEffect]) -> list[SomeEffect]:
        """The effects of one kind, in order."""
        return [one for one in self.effects if isinstance(one, kind)]

    @property
    def tensors(self) -> list[torch.Tensor | int | None]:
        """Per input what is the same in every call, or None where a call supplies it."""
        return [one.value if isinstance(one, Constant) else None for one in self.inputs]

    def fill(self, leaves: list[Any]) -> list[Any]:
        """The flat inputs of one call."""
        return self.filler().filled(leaves)

    def filler(self) -> fast_guards.PythonInputFiller:
        """Makes the flat inputs of calls."""
        hypers = [(place, one.hyper) for place, one in self.inputs_of(GroupNumber)]
        numbers = [(place, hyper.group, hyper.key, hyper.position) for place, hyper in hypers]
        arguments = [(place, one.leaf) for place, one in self.inputs_of(ArgumentLeaf)]
        grads = [(place, one.param) for place, one in self.inputs_of(EntryGrad)]
        return fast_guards.PythonInputFiller(self.tensors, numbers, arguments, grads)

    def around(self, function: fast_guards.Function) -> fast_guards.Function:
        """`function`, and after its outputs the gradients that the step returns, as they were before it: others may be
        in their places by the time of `finish`. Then the arguments that it returns."""
        if not self.returned_grads and not self.returned_inputs:
            return function

        def run(inputs: list[Any]) -> tuple[Any, ...]:
            given = [*self.entry_grads(), *(inputs[place] for place in self.returned_inputs)]
            return (*function(inputs), *given)

        return run

    def entry_grads(self) -> list[torch.Tensor | None]:
        """The gradients that the step returns, as they are before a run."""
        return [param.grad for param in self.returned_grads]

    def finish(self, outputs: tuple[Any, ...]) -> Any:
        """Applies all effects of a call and returns what the step returns. `outputs`: of what `around` gave."""
        call = CallOutcome(outputs)
        for effect in self.effects:
            effect.apply(call)
        while self.once:
            self.once.pop().apply(call)
        return call.result

    @property
    def only_returns(self) -> bool:
        """Whether all that a call leaves to do is to return its first output."""
        return (
            not self.once
            and len(self.effects) == 1
            and all(one.is_first_output for one in self.effects_of(BuildResult))
        )

    def synced(self, program: Program) -> list[torch.Tensor]:
        """Parameters and buffers of the program, in order: what data parallel makes equal at the start."""
        kinds, kept = (InputKind.PARAM, InputKind.BUFFER), program.host_buffers
        pairs = enumerate(zip(program.inputs, self.tensors, strict=True))
        return [
            t
            for index, (one, t) in pairs
            if one.kind in kinds and one.shard is None and index not in kept and isinstance(t, torch.Tensor)
        ]
