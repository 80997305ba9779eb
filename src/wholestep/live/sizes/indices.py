"""Indices of tensors as a record can hold them: tensors of numbers, as torch itself makes them of masks and arrays.

``x[mask]`` has as many rows as the mask has True, which no record can know. ``x[rows]`` with the numbers of those rows
is the same call, and has the shape of its argument. So the mask is looked at where it stands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

READS_ITEM, WRITES_ITEM = torch.Tensor.__getitem__, torch.Tensor.__setitem__


def plain_index(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    mask_values: Callable[[torch.Tensor], torch.Tensor],
    note_made: Callable[[Any], None],
) -> tuple[Any, ...]:
    """The arguments of a call with a plain index; they themselves if they have one.

    `mask_values` gives a mask whose values are known, of one that may not have run yet. `note_made` is given tensors
    that are made here.
    """
    if function not in (READS_ITEM, WRITES_ITEM) or len(args) < 2:
        return args
    tensor, index, *rest = args
    if function is READS_ITEM and _is_mask_of(tensor, index):
        plain: Any = mask_values(index).nonzero(as_tuple=True)
        note_made(plain)
        return (tensor, plain, *rest)
    indices = index if type(index) is tuple else (index,)
    made = [_without_numpy(one) for one in indices]
    new = [one for one, was in zip(made, indices, strict=True) if one is not was]
    if not new:
        return args
    note_made(new)
    return (tensor, tuple(made) if type(index) is tuple else made[0], *rest)


def _is_mask_of(tensor: torch.Tensor, index: Any) -> bool:
    """Whether an index is a mask that fits; torch says what is wrong with one that does not."""
    if not isinstance(index, torch.Tensor) or index.dtype != torch.bool or index.ndim == 0:
        return False
    return index.device == tensor.device and index.shape == tensor.shape[: index.ndim]


def _without_numpy(index: Any) -> Any:
    """Numbers and flat arrays of numbers as torch takes them; of arrays with more dims it makes several indices."""
    if isinstance(index, np.integer):
        return int(index)
    if type(index) is np.ndarray and index.ndim == 1 and index.dtype.kind == "i":
        return torch.tensor(index)
    return index
