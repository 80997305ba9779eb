"""Cross-entropy over a vocabulary and its gradient, in one kernel that reads the logits from memory once.

A row of logits is read twice: for its sum of exponentials, and for its gradient. In between it lies in the
cache of the GPU, if few rows are under way at a time. So programs are wide, two of them fill a multiprocessor, and each
has one row::

    lse      = log(sum(exp(x)))             one pass, with the maximum so far per lane
    loss     = lse - x[t]
    gradient = share * (exp(x - lse) - onehot(t))

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, for the sum in one pass.

Note: arithmetic
    All is computed in float32. Exponentials are powers of two, of ``x * log2(e) - c`` in one rounding, where c is the
    maximum, or lse, in the same unit: its own rounding is common to all terms of a row.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from wholestep.ir import node_meta
from wholestep.ir.ops.library import LIBRARY
from wholestep.lower.codecache import triton_cache

try:
    import triton
    import triton.language as tl
except ImportError:  # builds of torch for CPUs come without it
    triton = tl = None

_BLOCK = (1024, 8)
"""Lanes of a program, and how many logits in a row each of them reads at once: 16 bytes in half precision."""
_CONSTANTS = (_BLOCK, math.log2(math.e))
_OPTIONS = {"num_warps": 32, "debug": True, "sanitize_overflow": False}
"""Answers are checked, and sums are not."""

_FEWEST_CLASSES = 4096
"""Half of what a program reads at once. Of 8,192 rows with 7 classes each the kernel takes 217 us, as with thousands,
and what Inductor makes of such a loss 16 (H200)."""

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def _cross_entropy(tensors, numbers, block: tl.constexpr, log2e: tl.constexpr, all_classes: tl.constexpr):  # type: ignore[no-untyped-def]
    logits, target, share, losses, gradient = tensors
    classes, columns, stride, ignored = numbers
    partials: tl.constexpr = block[0]
    width: tl.constexpr = block[1]
    at = tl.arange(0, partials)[:, None] * width + tl.arange(0, width)[None, :]
    row = tl.program_id(0)
    read = logits + tl.cast(row, tl.int64) * stride
    highest = tl.full([partials], float("-inf"), tl.float32)
    total = tl.full([partials], 0.0, tl.float32)
    for first in range(0, columns, partials * width):
        x = tl.load(read + first + at, mask=first + at < columns, other=float("-inf")).to(tl.float32)
        if not all_classes:
            x = tl.where(first + at < classes, x, float("-inf"))
        new = tl.maximum(highest, tl.max(x, 1))
        # A lane may have seen nothing but -inf, whose share is zero.
        unit = tl.where(new == float("-inf"), 0.0, new) * log2e
        total = total * tl.exp2(highest * log2e - unit) + tl.sum(tl.exp2(x * log2e - unit[:, None]), 1)
        highest = new
    top = tl.max(highest, 0)
    unit = tl.where(top == float("-inf"), 0.0, top) * log2e
    lse = unit + tl.log2(tl.sum(total * tl.exp2(highest * log2e - unit), 0))
    answer = tl.load(target + row)
    counts = answer != ignored
    answer = tl.where(counts, answer, 0)
    tl.device_assert((answer >= 0) & (answer < classes), "an answer is out of range")
    picked = tl.load(read + answer).to(tl.float32)
    tl.store(losses + row, tl.where(counts, lse / log2e - picked, 0.0))
    factor = tl.where(counts, tl.load(share), 0.0)
    write = gradient + tl.cast(row, tl.int64) * columns
    for first in range(0, columns, partials * width):
        inside = first + at < columns
        x = tl.load(read + first + at, mask=inside, other=0.0).to(tl.float32)
        chance = tl.exp2(x * log2e - lse)
        hit = tl.where(first + at == answer, 1.0, 0.0)
        found = (chance - hit) * factor
        if not all_classes:
            found = tl.where(first + at < classes, found, 0.0)
        tl.store(write + first + at, found.to(gradient.dtype.element_ty), mask=inside)


_kernel: Any = triton.jit(_cross_entropy) if triton is not None else None


def takes(product: fx.Node) -> bool:
    """Whether the kernel can read what a node gives, and pays: on a GPU, in a type that is computed with in float32, of
    many classes."""
    value = node_meta.tensor(product)
    return value.is_cuda and value.dtype in _TYPES and value.shape[-1] >= _FEWEST_CLASSES and _kernel is not None


def cross_entropy(
    logits: Tensor, target: Tensor, share: Tensor, ignored: int, classes: int | None = None
) -> tuple[Tensor, Tensor]:
    """See `wholestep.passes.rewrites.fuse_cross_entropy`, which says what the operator of this name gives."""
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if len(logits):
        tensors = logits, target, share, losses, gradient
        triton_cache.wait()
        with torch.cuda.device_of(logits):
            triton_cache.keep(_kernel[(len(logits),)](tensors, *_rest(logits, ignored, classes), **_OPTIONS))
    return losses, gradient


def _rest(logits: Tensor, ignored: int, classes: int | None) -> tuple[Any, ...]:
    """What the kernel is told besides its tensors."""
    columns = logits.shape[1]
    classes = columns if classes is None else classes
    return (classes, columns, logits.stride(0), ignored), *_CONSTANTS, classes == columns


def build(node: fx.Node) -> triton_cache.Job:
    """What has Triton compile the kernel for a call, as its launch would."""
    logits, target, share, ignored, *classes = node.args
    types = [node_meta.tensor(one).dtype for one in (logits, target, share)]  # type: ignore[arg-type]
    given, value = triton_cache.addresses([*types, torch.float32, types[0]]), node_meta.tensor(logits)  # type: ignore[arg-type]
    rest = _rest(value, ignored, *(classes or [None]))  # type: ignore[arg-type]
    return partial(_kernel.warmup, given, *rest, grid=(1,), **_OPTIONS)


LIBRARY.impl("cross_entropy", cross_entropy, "CompositeExplicitAutograd")
