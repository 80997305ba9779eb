"""Layouts of tensors as guards compare them, and sentences that say how two differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from wholestep.ir.dtensor.shards import is_dtensor


def describe(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Type, dtype, shape, strides, device, ``requires_grad``, ``is_conj`` and ``is_neg`` of a tensor; of a sharded one
    also how it is cut and the memory of its part."""
    strides = tensor.stride() if tensor.layout is torch.strided else (tensor.layout,)
    plain = (type(tensor), tensor.dtype, tuple(tensor.shape), strides, tensor.device, tensor.requires_grad)
    if is_dtensor(tensor):
        local = tensor.to_local().detach()
        return (*plain, False, False, tensor.placements, tensor.device_mesh, tuple(local.shape), local.data_ptr())
    return (*plain, tensor.is_conj(), tensor.is_neg())


def difference(name: str, then: tuple[Any, ...], now: tuple[Any, ...]) -> str:
    """The sentence for two descriptions that differ; shortest where only dtype or shape do."""
    if then[1:3] != now[1:3]:
        short = [f"{str(one[1]).removeprefix('torch.')}{list(one[2])}" for one in (then, now)]
        return f"{name} was {short[0]}, is {short[1]}"
    return f"{name} was {_spell(then)}, is {_spell(now)}"


def _spell(description: tuple[Any, ...]) -> str:
    kind, dtype, shape, stride, device, *flags = description
    flags, cut = flags[:3], flags[3:]
    text = f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}"
    names = ("requires_grad", "lazily conjugate", "lazily negative")
    set_flags = "".join(f", {name}" for name, flag in zip(names, flags, strict=True) if flag)
    parts = f", {cut[0]} on {cut[1]}, of which {list(cut[2])} at {cut[3]:#x}" if cut else ""
    return f"{text}, strides {list(stride)}, {kind.__name__}{set_flags}{parts}"


def first_aliases(leaves: Sequence[Any], is_data: Sequence[bool]) -> list[int]:
    """Per leaf that is data, the number of the first leaf that is the very same tensor."""
    first: dict[int, int] = {}
    return [first.setdefault(id(leaf), number) for number, leaf in enumerate(leaves) if is_data[number]]


def short_text(value: Any) -> str:
    """A value in a sentence: its repr where that is short, else what kind of thing it is."""
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)} at {id(value):#x}"
    text = repr(value)
    return text if len(text) < 60 and "\n" not in text else f"a {type(value).__name__} at {id(value):#x}"
