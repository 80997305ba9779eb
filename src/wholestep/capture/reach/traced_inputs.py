"""The inputs of a trace, a row each: where it comes from, what it is called, and the tensor behind it.

Their order is decided here and nowhere else: the state, the numbers of parameter groups, the tensors of the arguments.
After them a trace has the numbers of this rank in its groups.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from wholestep.capture.reach.train_state import TrainState
from wholestep.capture.scalars.hyperparameters import Hyperparameter
from wholestep.ir.dtensor.layouts import local_tensor
from wholestep.ir.dtensor.shards import is_dtensor
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


@dataclass(frozen=True, slots=True)
class StateView:
    """A view of a tensor of the state that the step returns: it shows what later calls write there."""

    slot: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """In elements, from where the tensor of the slot begins."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view, of the tensor in the slot. It has no graph, as all that a captured step returns."""
        return tensor.detach().as_strided(self.shape, self.stride, int(tensor.storage_offset()) + self.offset)


@dataclass(frozen=True, slots=True)
class ArgumentRef:
    """A leaf of the result that is an argument to which the step has written, by its number among those of the user."""

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
    """The live tensor, or this rank's part of it; for a number of a group its box, 0-d float64 on the CPU."""
    trainable: bool = False
    """Whether it is a parameter that takes gradients."""

    @property
    def label(self) -> str:
        """What errors call it."""
        return f"argument tensor {self.source.number}" if isinstance(self.source, ArgumentSource) else self.name


def seen(tensor: torch.Tensor, *, parts: bool) -> torch.Tensor:
    """The tensor in whose place a trace has a fake. `parts`: of a DTensor that is this rank's part."""
    return local_tensor(tensor) if parts else tensor


def traced_inputs(
    state: TrainState, hypers: Sequence[Hyperparameter], arguments: Sequence[torch.Tensor], *, parts: bool
) -> list[TracedInput]:
    """All inputs of a trace but the numbers of ranks, in order. `parts`: of DTensors this rank's part is the input."""
    rows = [
        TracedInput(
            EntryGradSource(number) if slot.kind is InputKind.GRAD else StateSource(number),
            slot.kind, slot.name, seen(slot.tensor, parts=parts),
            trainable=slot.kind is InputKind.PARAM and slot.tensor.requires_grad,
        )
        for number, slot in enumerate(state.slots)
    ]  # fmt: skip
    rows += [TracedInput(HyperparameterSource(n), InputKind.HYPER, h.name, h.box) for n, h in enumerate(hypers)]
    rows += [TracedInput(ArgumentSource(n), InputKind.USER, f"args.{n}", one) for n, one in enumerate(arguments)]
    return rows


def shown_state(state: TrainState, boxes: Collection[int], *, parts: bool) -> dict[int, torch.Tensor]:
    """By slot the tensors of which a result may be a view. `boxes`: ids of those that are ours, and hold numbers.

    A gradient may be another one after the call, and a shard has no whole tensor to show.
    """
    slots = (
        (n, seen(slot.tensor, parts=parts)) for n, slot in enumerate(state.slots) if slot.kind is not InputKind.GRAD
    )
    return {
        number: tensor
        for number, tensor in slots
        if tensor.layout is torch.strided and not is_dtensor(tensor) and id(tensor) not in boxes
    }


def state_views(leaves: Sequence[Any], shown: dict[int, torch.Tensor], known: Collection[int]) -> dict[int, StateView]:
    """The leaves of a traced result, by place, that are views of those tensors. All of them are fake tensors now.

    `known`: ids of the tensors of the state, which are no views.
    """
    slots: dict[int, list[int]] = {}
    for slot, tensor in shown.items():
        slots.setdefault(tensor.untyped_storage()._cdata, []).append(slot)
    found = dict[int, StateView]()
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, FakeTensor) and leaf.layout is torch.strided and id(leaf) not in known:
            views = (_view(leaf, slot, shown[slot]) for slot in slots.get(leaf.untyped_storage()._cdata, ()))
            if (view := next(filter(None, views), None)) is not None:
                found[place] = view
    return found


def _view(leaf: torch.Tensor, slot: int, tensor: torch.Tensor) -> StateView | None:
    """A tensor as a view of another one on its memory; None if it shows more than that, or as another type."""
    sizes = (*leaf.shape, *leaf.stride(), leaf.storage_offset(), *tensor.shape)
    if leaf.dtype != tensor.dtype or leaf.is_conj() or leaf.is_neg() or not all(type(one) is int for one in sizes):
        return None
    offset = int(leaf.storage_offset()) - int(tensor.storage_offset())
    if offset < 0 or offset + _reach(leaf) > _reach(tensor):
        return None
    return StateView(slot, tuple(leaf.shape), leaf.stride(), offset)


def _reach(tensor: torch.Tensor) -> int:
    """How far its last element is from its first, in elements."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size)
