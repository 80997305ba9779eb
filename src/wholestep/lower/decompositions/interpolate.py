"""Gradients of linear interpolation, gathered: each place of the small image asks the large one for its share.

ATen's kernels on GPUs go the other way, and every place of the large image adds to up to eight of the small one, by
atomics: enlarging 32 by 32 to 256 by 256 has 4 values times 64 meet in one place. Inductor has no rule for these
operators and would call ATen. The sums here are in another order than ATen's, whose own order changes from run to run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._decomp import decomposition_table

_aten: Any = torch.ops.aten


def rules(device: torch.device) -> dict[Any, Callable[..., Tensor]]:
    """Operator -> what a compiler for the device is given in its place. The kernels of CPUs need no atomics.

    Torch describes what ATen's kernel gives for fewer than 16 channels on a GPU as contiguous. It stays channels-last,
    and Inductor, which asserts what it was told, would end there: so the kernel is not called.
    """
    if device.type == "cpu":
        return {}
    names = ("upsample_linear1d_backward", "upsample_bilinear2d_backward", "upsample_trilinear3d_backward")
    found = {getattr(_aten, name).default: gradient_of_linear for name in names}
    forward = _aten.upsample_bilinear2d.default
    return found | ({forward: decomposition_table[forward]} if forward in decomposition_table else {})


def gradient_of_linear(
    gradient: Tensor, output_size: Sequence[int], input_size: Sequence[int], align_corners: bool, *scales: float | None
) -> Tensor:
    """The gradient of what was interpolated linearly in all dims after the second one.

    `gradient`: of the result, of sizes (n, channels, *`output_size`); `input_size` with n and channels, as are the
    sizes returned. `scales`: per dim how many times larger, where the user said so and not how large. Halves are added
    up in float32.
    """
    if any(
        large == small and scale not in (None, 1)
        for large, small, scale in zip(output_size, input_size[2:], scales, strict=False)
    ):
        # Whether that is a copy differs from kernel to kernel of ATen's: it does it itself.
        return cast("Tensor", NotImplemented)
    found = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    for place, (large, small) in enumerate(zip(output_size, input_size[2:], strict=True)):
        scale = scales[place] if place < len(scales) else None
        step = _step(large, small, align_corners, scale)
        found = _gathered(found, 2 + place, (large, small), step, align_corners)
    return found.to(gradient.dtype)


def _step(large: int, small: int, align_corners: bool, scale: float | None) -> float:
    """How far two neighbours of the result are from each other, in places of the input; as ATen reckons it."""
    if align_corners:
        return (small - 1) / (large - 1) if large > 1 else 0.0
    return 1 / scale if scale is not None and scale > 0 else small / large


def _gathered(gradient: Tensor, dim: int, sizes: tuple[int, int], step: float, align_corners: bool) -> Tensor:
    """One dim of the gradient, from the first of the `sizes` to the second."""
    large, small = sizes
    # Whoever reads place i lies between i - 1 and i + 1. A reader at either end weighs nothing, so it does no harm if
    # a rounding leaves it out.
    reach = large if step == 0 or small == 1 else min(large, math.floor(2 / step) + 1)
    place = torch.arange(small, device=gradient.device)
    shift = 0.0 if align_corners else 0.5
    first = ((place - 1 + shift) / step - shift).ceil() if step else place * 0.0
    readers = first.clamp(0, large - reach).to(torch.int64)[:, None] + torch.arange(reach, device=gradient.device)
    source = ((readers.to(torch.float32) + shift) * step - shift).clamp(0, small - 1)
    share = (1 - (source - place[:, None]).abs()).clamp_min(0).to(gradient.dtype)
    seen = _aten._unsafe_index(gradient, [*[None] * dim, readers])
    found: Tensor = (seen * share.reshape(share.shape + (1,) * (gradient.ndim - 1 - dim))).sum(dim + 1)
    # Inductor would reckon this anew for every reader in the next dim; it makes what is viewed by strides.
    return torch.as_strided(found, found.shape, found.stride())
