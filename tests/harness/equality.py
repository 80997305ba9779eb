"""Whether compiled code gives what eager code gives: in every bit on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROUNDINGS = 8
"""On a GPU Inductor adds up in another order than ATen, and multiplies and adds at once: that much of the largest value
there is, or of one, which is how large what these steps add up is."""


def equal(a: Any, b: Any, computed: torch.dtype | None = None) -> bool:
    """Two leaves of what a step gives. `computed`: the type in which it was computed, where that is another one."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and a == b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.is_cuda or not a.is_floating_point() or not a.numel():
        return torch.equal(a, b)
    most = ROUNDINGS * torch.finfo(computed or a.dtype).eps * max(1.0, float(a.abs().max()))
    return bool((a - b).abs().max() <= most)
