"""The inputs of a trace, a row each: where it comes from, what it is called, and the tensor behind it.

Their order is decided here and nowhere else: the state, the numbers of parameter groups, the tensors of the arguments.
Behind them a trace has the numbers of this rank in its groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from wholestep.capture.reach.train_state import TrainState
from wholestep.capture.scalars.hyperparameters import Hyperparameter
from wholestep.ir.program import InputKind


@dataclass(frozen=True, slots=True)
class StateSource:
    """A tensor of the state, by its slot: the same one in every call."""

    slot: int


@dataclass(frozen=True, slots=True)
class EntryGradSource:
    """The gradient that a parameter has when a call begins, by the slot of the gradient."""

    slot: int


@dataclass(frozen=True, slots=True)
class HyperparameterSource:
    """A number of a parameter group, by its place among them."""

    number: int


@dataclass(frozen=True, slots=True)
class ArgumentSource:
    """A tensor among the arguments, by its place among them, each counted once."""

    number: int


@dataclass(frozen=True, slots=True)
class RankSource:
    """The number of this rank in a group, by the place of the group."""

    number: int


InputSource = StateSource | EntryGradSource | HyperparameterSource | ArgumentSource | RankSource


@dataclass(frozen=True, slots=True)
class TracedInput:
    """One input of a trace."""

    source: InputSource
    kind: InputKind
    name: str
    """As programs show it."""
    tensor: torch.Tensor
    """The live tensor; for a number of a group its box, 0-d float64 on the CPU."""

    @property
    def label(self) -> str:
        """What errors call it."""
        return f"argument tensor {self.source.number}" if isinstance(self.source, ArgumentSource) else self.name


def traced_inputs(
    state: TrainState, hypers: Sequence[Hyperparameter], arguments: Sequence[torch.Tensor]
) -> list[TracedInput]:
    """All inputs of a trace but the numbers of ranks, in order."""
    rows = [
        TracedInput(
            EntryGradSource(number) if slot.kind is InputKind.GRAD else StateSource(number),
            slot.kind, slot.name, slot.tensor,
        )
        for number, slot in enumerate(state.slots)
    ]  # fmt: skip
    rows += [TracedInput(HyperparameterSource(n), InputKind.HYPER, h.name, h.box) for n, h in enumerate(hypers)]
    rows += [TracedInput(ArgumentSource(n), InputKind.USER, f"args.{n}", one) for n, one in enumerate(arguments)]
    return rows
