"""Copies results of a step out of the memory of its CUDA graphs, where the next replay writes.

Results are copied, so that they may be kept. What they share with each other they share as copies, too: a gradient
that is returned is the parameter's own, and a row of what is returned is a row of it. What lies in an input (the input
itself, a row of a parameter) is no copy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StaticInput:
    """The tensor that graphs read or write where a call has an input."""

    number: int
    """Of the input."""
    tensor: Tensor
    stride: tuple[int, ...]
    """Of the input: a copy may have another one."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call, while its results are copied."""

    inputs: Sequence[Any]
    values: Mapping[int, Tensor]
    """The results by number, where graphs have left them."""
    made: dict[Any, Tensor] = field(default_factory=dict)
    """Copies so far."""


class OutputCopy(Protocol):
    """Copies one result, in every call that leaves it in the same memory."""

    def __call__(self, call: Call) -> Tensor:
        """The result, for the caller to keep."""


@dataclass(frozen=True, slots=True)
class _InputView:
    """A view of an input, `distance` elements after its first."""

    number: int
    size: torch.Size
    stride: tuple[int, ...]
    distance: int

    def __call__(self, call: Call) -> Tensor:
        whole: Tensor = call.inputs[self.number]
        if self.distance == 0 and whole.size() == self.size and whole.stride() == self.stride:
            return whole
        return whole.as_strided(self.size, self.stride, whole.storage_offset() + self.distance)


@dataclass(frozen=True, slots=True)
class _Copy:
    number: int
    """Of the first result that is this tensor."""

    def __call__(self, call: Call) -> Tensor:
        if self.number not in call.made:
            call.made[self.number] = call.values[self.number].clone()
        return call.made[self.number]


@dataclass(frozen=True, slots=True)
class _CopyView:
    """A part of one copy, of the `extent` elements that begin with the result `first`."""

    number: int
    """Of the first result that is this tensor."""
    first: int
    extent: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def __call__(self, call: Call) -> Tensor:
        whole = ("whole", self.first)
        if whole not in call.made:
            call.made[whole] = call.values[self.first].as_strided((self.extent,), (1,)).clone()
        if self.number not in call.made:
            call.made[self.number] = call.made[whole].as_strided(self.size, self.stride, self.offset)
        return call.made[self.number]


def storage_of(tensor: Tensor) -> int:
    """Where the storage begins."""
    return tensor.untyped_storage().data_ptr()


def has_storage(value: Any) -> bool:
    """Whether a value is a tensor whose elements are in one storage: not a number, and not a sparse tensor."""
    return isinstance(value, Tensor) and value.layout is torch.strided


def plan_copies(
    values: Mapping[int, Tensor], static_inputs: Mapping[int, StaticInput], *, new: Collection[int] = ()
) -> dict[int, OutputCopy]:
    """How to copy results, by number.

    `static_inputs` are by where their storage begins; `new` results are copied in any case."""
    found: dict[int, OutputCopy] = {}
    own: dict[int, Tensor] = {}
    for number, value in values.items():
        at = static_inputs.get(storage_of(value))
        if number not in new and at is not None and _is_seen_in(value, at.tensor) and at.tensor.stride() == at.stride:
            distance = int(value.storage_offset() - at.tensor.storage_offset())
            found[number] = _InputView(at.number, value.size(), value.stride(), distance)
        else:
            own[number] = value
    objects: dict[int, int] = {}
    leaders = {number: objects.setdefault(id(value), number) for number, value in own.items()}
    for some in _overlapping(own):
        found |= _copied({number: own[number] for number in some}, leaders)
    return found


def unshared(values: Mapping[int, Tensor]) -> set[int]:
    """The numbers of results that share memory with no other result."""
    return {some[0] for some in _overlapping(values) if len(some) == 1}


def _is_seen_in(value: Tensor, other: Tensor) -> bool:
    """Whether sizes, strides and an offset in the storage of `other` are all there is to `value`."""
    plain = not any(one.is_conj() or one.is_neg() for one in (value, other))
    return plain and value.dtype is other.dtype and value.numel() > 0


def _overlapping(values: Mapping[int, Tensor]) -> list[list[int]]:
    """The numbers of results, those together that lie in between each other's ends; of these the first in memory
    first."""
    begins = {number: value.data_ptr() for number, value in values.items()}
    ends = {number: begins[number] + _extent(value) * value.element_size() for number, value in values.items()}
    found: list[list[int]] = []
    end = -1
    for number in sorted(values, key=lambda number: (begins[number], -ends[number])):
        if begins[number] < min(end, ends[number]):
            found[-1].append(number)
        else:
            found.append([number])
        end = max(end, ends[number])
    return found


def _extent(value: Tensor) -> int:
    """Elements from the first to the last."""
    reach = sum((size - 1) * stride for size, stride in zip(value.size(), value.stride(), strict=True))
    return reach + 1 if value.numel() else 0


def _copied(values: Mapping[int, Tensor], leaders: Mapping[int, int]) -> dict[int, OutputCopy]:
    """How to take results that lie in between each other's ends. Parts that leave most of that out, as columns of a
    wide matrix do, are copied each by itself. `leaders`: per number the first one of the same tensor."""
    first, earliest = next(iter(values.items()))
    objects = {leaders[number]: value for number, value in values.items()}
    begin = earliest.storage_offset()
    extent = int(max(value.storage_offset() + _extent(value) for value in values.values()) - begin)
    same = {storage_of(value) for value in values.values()} == {storage_of(earliest)}
    as_one = same and len(objects) > 1 and all(_is_seen_in(value, earliest) for value in values.values())
    if not as_one or extent > sum(value.numel() for value in objects.values()):
        return {number: _Copy(leaders[number]) for number in values}
    return {
        number: _CopyView(
            leaders[number], first, extent, value.size(), value.stride(), int(value.storage_offset() - begin)
        )
        for number, value in values.items()
    }
