"""GradientSums: gradients that a backward has left, reduced over all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist

from wholestep.config import DDP, CastCompress, Strategy
from wholestep.ir.program import MeshAxis
from wholestep.live.ranks.sharded_parameters import all_reduced, from_all_ranks

SPARSE = 2
"""What a rank says of a gradient that is sparse: more than 1, which says that there is one."""


class GradientSums:
    """How a strategy reduces gradients that are there one by one."""

    def __init__(self, strategy: Strategy, axes: tuple[MeshAxis, ...]) -> None:
        """`axes`: of the mesh, as `data_axes` gives them."""
        self._is_mean = strategy.reduce == "mean"
        self._wire = strategy.compress if isinstance(strategy, DDP) else None
        self._axes, self._num_ranks = axes, math.prod(axis.size for axis in axes)

    def reduce(self, grads: Iterable[torch.Tensor]) -> None:
        """In place, one message for each dtype; the arithmetic is that of the placed graph."""
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for grad in grads:
            if is_sparse(grad):
                self._join(grad)
            else:
                by_dtype.setdefault(grad.dtype, []).append(grad)
        for dtype, same in by_dtype.items():
            flat = torch.cat([grad.detach().reshape(-1) for grad in same])
            flat = flat.to(self._wire.dtype) if isinstance(self._wire, CastCompress) else flat
            if self._is_mean:
                flat.mul_(1.0 / self._num_ranks)
            all_reduced(flat, dist.ReduceOp.SUM, self._axes)
            parts = flat.to(dtype).split([grad.numel() for grad in same])
            for grad, part in zip(same, parts, strict=True):
                grad.detach().copy_(part.view(grad.shape))

    def _join(self, grad: torch.Tensor) -> None:
        """A sparse gradient, in place: its entries are those of all ranks, which may have different numbers of them."""
        own = grad.coalesce()
        indices, values = own.indices().t(), own.values()
        if self._is_mean:
            values = values * (1.0 / self._num_ranks)
        counts = from_all_ranks(torch.tensor([len(values)], device=grad.device), self._axes)
        parts = []
        for rows in (indices, values):
            padded = rows.new_zeros((int(max(counts)), *rows.shape[1:]))
            padded[: len(rows)] = rows
            parts.append(
                torch.cat([one[: int(n)] for one, n in zip(from_all_ranks(padded, self._axes), counts, strict=True)])
            )
        grad.copy_(torch.sparse_coo_tensor(parts[0].t(), parts[1], grad.shape, check_invariants=False).coalesce())


def is_sparse(grad: torch.Tensor | None) -> bool:
    """Whether it is a sparse gradient."""
    return grad is not None and grad.layout is torch.sparse_coo
