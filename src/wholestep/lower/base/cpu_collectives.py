"""Collectives of ranks on CPUs that gloo runs slowly as torch asks it to: what stands in for them.

gloo has no reduce-scatter of several tensors. torch reduces each of them whole, one after the other: 53 small ones take
25 ms on two processes, and 4 ms as one message. Memory of CPUs is copied quickly, so they are put together here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from wholestep.ir import op_info

_TOGETHER = op_info.c10d.reduce_scatter_tensor_coalesced.default


def reduce_scatter_together(tensors: Sequence[Tensor], reduce_op: str, size: int, group: str) -> list[Tensor]:
    """The parts of this rank of the sums of tensors, as ``reduce_scatter_tensor_coalesced`` gives them.

    Args:
        tensors: of shapes (size * rows, ...), each with `rows` of its own.
        reduce_op: as functional collectives write it.
        size: the number of ranks in the group.
        group: its name.

    On CPUs, tensors of one dtype are one message, and the results are there. Others start as torch has it.
    """
    first = tensors[0]
    if not first.is_cpu or len(tensors) < 2 or any(one.dtype is not first.dtype for one in tensors):
        started: list[Tensor] = _TOGETHER(tensors, reduce_op, size, group)
        return started
    message = torch.cat([one.reshape(size, -1) for one in tensors], 1)
    reduced = op_info.WAIT(op_info.c10d.reduce_scatter_tensor(message.flatten(), reduce_op, size, group))
    parts = reduced.split([one.numel() // size for one in tensors])
    return [
        part.clone().view(one.shape[0] // size, *one.shape[1:]) for part, one in zip(parts, tensors, strict=True)
    ]  # fmt: skip


REPLACEMENTS: Mapping[Any, Callable[..., Any]] = {_TOGETHER: reduce_scatter_together}
"""By operator of torch."""
