"""Sums over the rows of partial sums: one kernel for all that a kernel of Inductor has left in its workspace.

The gradient of a norm reads the same values for its input, row by row, and for its weights, down the columns. Inductor
computes both in one kernel, every program of which adds up a few rows for the weights. Those sums lie in a workspace,
for W2's norms two times 512 rows of 768, which this kernel adds up for weights and biases in one launch.

Note: blocks
    The partial sums were just written and lie in the cache of the GPU. So one trip there and back is what the kernel
    takes, if all that a thread reads is under way at once: 8 float4 in 32 registers. 8 columns are the 32 bytes that
    the cache hands out; with more columns a program, multiprocessors would be idle. No program waits for another one,
    and the order of the additions is always the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wholestep.ir.ops.library import LIBRARY
from wholestep.lower.codecache import triton_cache

try:
    import triton
    import triton.language as tl
except ImportError:  # builds of torch for CPUs come without it
    triton = tl = None

_BLOCK = (512, 8)
"""Rows and columns that a program reads at once."""
_WARPS = 4

_CALL = re.compile(r"\bcolumn_sums\.default\(\w+, (\d+), (\d+), (\d+)\)")
"""As `wholestep.lower.inductor.wrapper_patch` writes it."""


def _sum_columns(workspace, results, size, count: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    rows, columns = size
    height: tl.constexpr = block[0]
    width: tl.constexpr = block[1]
    which = tl.program_id(1)
    column = tl.program_id(0) * width + tl.arange(0, width)
    row = tl.arange(0, height)[:, None]
    at = workspace + which.to(tl.int64) * rows * columns + row * columns + column[None, :]
    inside = (column < columns)[None, :]
    total = tl.full([height, width], 0.0, tl.float32)
    for first in range(0, rows, height):
        total += tl.load(at, mask=(first + row < rows) & inside, other=0.0)
        at += height * columns
    sums = tl.sum(total, 0)
    for one in tl.static_range(count):
        if which == one:
            tl.store(results[one] + column, sums, mask=column < columns)


_kernel: Any = triton.jit(_sum_columns) if triton is not None else None


def column_sums(workspace: Tensor, count: int, rows: int, columns: int) -> list[Tensor]:
    """The sums over the rows of matrices that lie one after the other.

    Args:
        workspace: float32, the first of ``count * rows * columns`` numbers.
        count: number of matrices.
        rows: of each.
        columns: of each.

    Gives a vector of `columns` float32 per matrix.
    """
    results = [torch.empty(columns, dtype=torch.float32, device=workspace.device) for _ in range(count)]
    grid = (-(-columns // _BLOCK[1]), count)
    triton_cache.wait()
    triton_cache.keep(_kernel[grid](workspace, tuple(results), (rows, columns), count, _BLOCK, num_warps=_WARPS))
    return results


def builds(module: str) -> Iterator[triton_cache.Job]:
    """What has Triton compile the kernel for the calls in text of Inductor's modules, as launches would."""
    for call in dict.fromkeys(_CALL.findall(module)):
        count, rows, columns = map(int, call)
        workspace, *results = triton_cache.addresses([torch.float32] * (count + 1))
        given = (workspace, tuple(results), (rows, columns), count, _BLOCK)
        yield partial(_kernel.warmup, *given, grid=(1,), num_warps=_WARPS)


LIBRARY.define("column_sums(Tensor workspace, int count, int rows, int columns) -> Tensor[]")
LIBRARY.impl("column_sums", column_sums, "CompositeExplicitAutograd")
