"""The addition of a reduction by copies: one kernel, whose text is Triton's, for any number of elements."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from wholestep.lower.codecache import triton_cache

try:
    import triton
    import triton.language as tl
except ImportError:  # builds of torch for CPUs come without it
    triton = tl = None

_BLOCK = 4096
"""Elements of one program: two reads of 16 bytes per thread and rank in float32."""
_WARPS = 16


def _add(memory, length, stride, how: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    slots, own, result, shared = memory
    ranks: tl.constexpr = how[0]
    rank: tl.constexpr = how[1]
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < length
    total = tl.full([block], 0.0, tl.float64 if result.dtype.element_ty == tl.float64 else tl.float32)
    for other in tl.static_range(ranks):
        part = tl.load(own + at if other == rank else slots + other * stride + at, mask=inside)
        total += part.to(total.dtype)
    if how[2]:
        total *= (tl.full([], 1.0, tl.float64) / ranks).to(total.dtype)
    tl.store(result + at, total.to(result.dtype.element_ty), mask=inside)
    tl.store(shared + at, total.to(result.dtype.element_ty), mask=inside)


_kernel: Any = triton.jit(_add) if triton is not None else None


def add_parts(slots: Tensor, own: Tensor, result: Tensor, shared: Tensor, *, rank: int, averages: bool) -> None:
    """The sum or the mean over the ranks, in their order, written to `result` and `shared`.

    Args:
        slots: shape (ranks, elements), in one floating dtype; rows may be farther apart than they are long.
        own: shape (elements), of the same dtype: what is read in the place of row `rank`. May be `result`.
        result: shape (elements), of the same dtype or a wider one. Half precision is added in float32.
        shared: like `result`.
        rank: of the owner.
        averages: whether the mean is wanted.
    """
    if not own.numel():
        return
    how, memory = (len(slots), rank, averages), (slots, own, result, shared)
    triton_cache.wait()
    _kernel[(-(-own.numel() // _BLOCK),)](memory, own.numel(), slots.stride(0), how, _BLOCK, num_warps=_WARPS)


def build(dtype: torch.dtype, wide: torch.dtype, *, size: int, rank: int, averages: bool) -> triton_cache.Job:
    """What has Triton compile the kernel for parts in `dtype` of `size` ranks and results in `wide`, as launches for
    parts of most messages would: lengths are multiples of 16 there."""
    how, memory = (size, rank, averages), triton_cache.addresses([dtype, dtype, wide, wide])
    return partial(_kernel.warmup, memory, 16, 16, how, _BLOCK, grid=(1,), num_warps=_WARPS)
