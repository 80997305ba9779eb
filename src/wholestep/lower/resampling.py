"""Gradients of linear interpolation, gathered: each place of the small image asks the large one for its share.

ATen's kernels on GPUs go the other way, and every place of the large image adds to up to eight of the small one, by
atomics: enlarging 32 by 32 to 256 by 256 has 4 values times 64 meet in one place. Inductor has no rule for these
operators and would call ATen. The sums here are in another order than ATen's, whose own order changes from run to run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_aten: Any = torch.ops.aten


def rules(device: torch.device) -> dict[Any, Callable[..., Tensor]]:
    """Operator -> what a compiler for the device is given in its place. The kernels of CPUs need no atomics."""
    names = ("upsample_linear1d_backward", "upsample_bilinear2d_backward", "upsample_trilinear3d_backward")
    return {} if device.type == "cpu" else {getattr(_aten, name).default: gradient_of_linear for name in names}


def gradient_of_linear(
    gradient: Tensor, output_size: Sequence[int], input_size: Sequence[int], align_corners: bool, *scales: float | None
) -> Tensor:
    """The gradient of what was interpolated linearly in all dims behind the second one.

    `gradient`: of the result, of sizes (n, channels, *`output_size`); `input_size` with n and channels, as are the
    sizes returned. `scales`: per dim how many times larger, where the user said so and not how large. Halves are added
    up in float32.
    """
    if any(
        large == small and scale not in (None, 1)
        for large, small, scale in zip(output_size, input_size[2:], scales, strict=False)
    ):
        return NotImplemented  # whether that is a copy differs from kernel to kernel of ATen's: it does it itself
    found = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    for place, (large, small) in enumerate(zip(output_size, input_size[2:], strict=True)):
        scale = scales[place] if place < len(scales) else None
        found = _gathered(found, 2 + place, large, small, _step(large, small, align_corners, scale), align_corners)
    return found.to(gradient.dtype)


def _step(large: int, small: int, align_corners: bool, scale: float | None) -> float:
    """How far two neighbours of the result are from each other, in places of the input; as ATen reckons it."""
    if align_corners:
        return (small - 1) / (large - 1) if large > 1 else 0.0
    return 1 / scale if scale is not None and scale > 0 else small / large


def _gathered(gradient: Tensor, dim: int, large: int, small: int, step: float, align_corners: bool) -> Tensor:
    """One dim of the gradient, from `large` places to `small`."""
    # Whoever reads place i lies between i - 1 and i + 1. One more on each side takes care of roundings: it weighs 0.
    reach = large if step == 0 or small == 1 else min(large, math.ceil(2 / step) + 3)
    place = torch.arange(small, device=gradient.device)
    first = (
        (place - 1.0 if align_corners else place - 0.5) / step - (0.0 if align_corners else 0.5)
        if step
        else place * 0.0
    )
    first = (first.floor() - 1).clamp(0, large - reach)
    readers = first.to(torch.int64)[:, None] + torch.arange(reach, device=gradient.device)
    where = readers.to(torch.float32)
    source = where * step if align_corners else ((where + 0.5) * step - 0.5).clamp_min(0)
    low = source.to(torch.int64).clamp_max(small - 1)
    upper = (source - low).clamp(0, 1)
    high = low + (low < small - 1).to(torch.int64)
    share = torch.where(low == place[:, None], 1 - upper, 0.0) + torch.where(high == place[:, None], upper, 0.0)
    indices: list[Tensor | None] = [None] * dim
    seen = _aten._unsafe_index(gradient, [*indices, readers])
    return (seen * share.to(gradient.dtype).reshape(share.shape + (1,) * (gradient.ndim - 1 - dim))).sum(dim + 1)
