"""A whole fake tensor in the place of a live DTensor.

[Note: why the fake has a class of its own]
A trace exchanges the contents of live tensors with fakes (`capture/tracing/tensor_swap.py`), and Python exchanges the
classes of two objects only if both have the same slots. A DTensor has two of its own; this fake has slots of the same
names. What it stands for is plain: the whole tensor, without a mesh. So the program of a sharded model is that of the
plain one.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor


class _Slots(torch.Tensor):
    __slots__ = list(DTensor.__slots__)


class WholeFake(_Slots, FakeTensor):
    """A fake tensor whose object has the layout of a DTensor."""


def whole_fake(mode: FakeTensorMode, real: DTensor) -> torch.Tensor:
    """A fake of the whole tensor that a DTensor is a part of: its shape, strides, dtype and device."""
    like = torch.empty_strided(tuple(real.shape), real.stride(), dtype=real.dtype, device="meta")
    fake = FakeTensor.__new__(WholeFake, mode, like, real.device)
    fake.requires_grad_(real.requires_grad)
    if getattr(real, "_is_param", False):
        fake._is_param = True
    return fake
