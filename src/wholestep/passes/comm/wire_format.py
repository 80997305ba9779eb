"""Sends gradients of embeddings as the rows that a batch has looked up, where those are few.

Before and after, for a table that its group reduces by copies::

    grad = aten.embedding_dense_backward(d, index, 50304, -1, False)
    start = all_reduce(grad, "avg", "0")    ->    start = all_reduce_rows_by_copies(grad, "avg", "0", indices=index)

What is given and what comes back is the dense table in both cases, and the same bits: every rank adds the rows of all
ranks in their order. Source of the idea: Kim et al., "Parallax: Sparsity-aware Data Parallel Training of Deep Neural
Networks", 2019.

Note: the same on every rank, whatever its batch is
    Ranks must come to a message in one way, and one whose batch changes captures again alone, with nobody to ask. So
    which tables go as rows is chosen once, by rank 0 on its first batch, and the number of rows is no part of the plan:
    a rank sends as many as it has. With more than there is room for, or a gradient that is no look-up, its table is
    read whole (`lower/kernels/sparse_all_reduce.py`), which is slower and as right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.fx as fx

from wholestep.ir import node_meta

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class WireFormat:
    """How a gradient goes to who adds it."""

    dtype: torch.dtype
    """The type in which it goes there. It comes back in its own."""
    max_rows: int = 0
    """As how many rows of it, at most, it had better go, in the place of the whole; 0: not as rows. The same on every
    rank, whatever its batch is."""


ChooseWireFormat = Callable[[fx.Node, str], WireFormat]
"""Of a gradient and the group that reduces it, its way."""


def unchanged(grad: fx.Node, group: str) -> WireFormat:
    """Whole, in its own type."""
    return WireFormat(dtype=node_meta.tensor(grad).dtype)


def lookup_indices(grad: fx.Node) -> fx.Node | None:
    """The indices of the rows that are not zero, where a gradient is that of one embedding."""
    while grad.target is _aten.mul.Tensor and isinstance(grad.args[1], (int, float)) and math.isfinite(grad.args[1]):
        (grad,) = grad.all_input_nodes
    if grad.target is not _aten.embedding_dense_backward.default:
        return None
    indices = grad.args[1]
    return indices if isinstance(indices, fx.Node) else None


def num_rows(grad: fx.Node) -> int | None:
    """As how many rows a gradient can go; None where it is no look-up."""
    indices = lookup_indices(grad)
    return None if indices is None else node_meta.tensor(indices).numel()


def share(grad: fx.Node, ranks: int) -> float:
    """Bytes of which the reduction takes as long as the rows do to reach all ranks, of those of the table.

    A rank gives its rows to every other one; of a reduction it gives a part of the table to each, and takes one.
    """
    rows, table = num_rows(grad), node_meta.tensor(grad)
    return 1.0 if rows is None else min(1.0, rows * ranks / (2 * table.shape[0]))
