"""PowerSGD on tensors: gradients as products of two thin matrices, which are reduced.

A gradient M (rows x cols) is approximated by P Q^T with P (rows x rank) and Q (cols x rank). One power iteration per
step: P = sum over ranks of M Q, made orthonormal; Q = mean over ranks of M^T P. What the approximation misses is
added to the next gradient (error feedback), and Q starts from the one of the step before (warm start).

The order of operations, and of the elements in each message, is that of the communication hook of PyTorch
(``powerSGD_hook``), so that both give the same numbers. Source: Vogels et al., "PowerSGD: Practical Low-Rank Gradient
Compression for Distributed Optimization", 2019.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from wholestep.config import PowerSGD

_aten = torch.ops.aten

Messages = dict[str, Tensor]
"""Tensors that travel together, by what they are; the answer has their sums over the ranks, by the same names."""


@dataclass(frozen=True, slots=True)
class Factor:
    """A gradient that is compressed: its index, and the matrix it is seen as."""

    index: int
    rows: int
    cols: int
    rank: int

    @property
    def numel(self) -> int:
        """Elements that travel in its place: P and Q."""
        return (self.rows + self.cols) * self.rank


def find_factors(shapes: Sequence[Sequence[int]], config: PowerSGD) -> list[Factor]:
    """The gradients that shrink by more than ``config.min_compression_rate``.

    A gradient is a matrix of its first dimension and all others. Matrices of one shape follow each other.
    """
    by_shape: dict[tuple[int, int], list[Factor]] = {}
    for index, shape in enumerate(shapes):
        if not shape or not prod(shape):
            continue
        rows, cols = shape[0], prod(shape[1:])
        factor = Factor(index, rows, cols, min(rows, cols, config.rank))
        if factor.numel * config.min_compression_rate < rows * cols:
            by_shape.setdefault((rows, cols), []).append(factor)
    return [factor for same in by_shape.values() for factor in same]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """What every rank holds after the exchange."""

    grads: list[Tensor]
    """Means of the gradients over the ranks, in the shapes of those given."""
    errors: list[Tensor]
    """What this rank's gradients have that the means have not; empty without error feedback."""
    qs: list[Tensor]
    """Q of each factor, (cols, rank), from which the next step starts."""


def exchange(
    grads: Sequence[Tensor],
    errors: Sequence[Tensor],
    qs: Sequence[Tensor],
    *,
    config: PowerSGD,
    num_ranks: int,
) -> Generator[Messages, Messages, Reduced]:
    """One step of PowerSGD for a bucket: a generator of tensors to sum, which is sent the sums.

    Args:
        grads: contiguous gradients of this rank, of any shapes.
        errors: those that the step before left, in the same shapes; empty without error feedback.
        qs: of each of `find_factors`, (cols, rank); only their span counts.
        num_ranks: on how many ranks this runs.
    """
    factors = find_factors([grad.shape for grad in grads], config)
    whole = list(_aten._foreach_add.List(list(grads), list(errors))) if errors else list(grads)
    matrices = [whole[one.index].view(1, one.rows, one.cols) for one in factors]
    starts = [orthogonalize(q.unsqueeze(0), config.orthogonalization_epsilon) for q in qs]
    packed = {one.index for one in factors}
    rest = [index for index in range(len(grads)) if index not in packed]
    messages: Messages = {"uncompressed": _joined([whole[index] for index in rest])} if rest else {}
    if factors:
        messages["P"] = _joined([torch.bmm(m, q) for m, q in zip(matrices, starts, strict=True)])
    sums = yield messages
    results: dict[int, Tensor] = {}
    new_qs: list[Tensor] = []
    if rest:
        parts = (sums["uncompressed"] / num_ranks).split([whole[index].numel() for index in rest])
        results = {index: part.view_as(whole[index]) for index, part in zip(rest, parts, strict=True)}
    if factors:
        parts = sums["P"].split([one.rows * one.rank for one in factors])
        shaped = (part.view(1, one.rows, one.rank) for part, one in zip(parts, factors, strict=True))
        ps = [orthogonalize(p, config.orthogonalization_epsilon) for p in shaped]
        sums = yield {"Q": _joined([torch.bmm(m.transpose(1, 2), p) for m, p in zip(matrices, ps, strict=True)])}
        parts = (sums["Q"] / num_ranks).split([one.cols * one.rank for one in factors])
        new_qs = [part.view(one.cols, one.rank) for part, one in zip(parts, factors, strict=True)]
        for one, p, q in zip(factors, ps, new_qs, strict=True):
            results[one.index] = torch.bmm(p, q.unsqueeze(0).transpose(1, 2)).view_as(whole[one.index])
    reduced = [results[index] for index in range(len(grads))]
    return Reduced(grads=reduced, errors=list(_aten._foreach_sub.List(whole, reduced)) if errors else [], qs=new_qs)


def orthogonalize(matrices: Tensor, epsilon: float) -> Tensor:
    """`matrices` (batch, rows, rank), rank <= rows, with orthonormal columns; contiguous.

    Gram-Schmidt for up to two columns and in half precision, which QR does not know; `epsilon` is added to norms.
    """
    num_cols = matrices.shape[2]
    if num_cols > 2 and matrices.dtype not in (torch.float16, torch.bfloat16):
        columns: Tensor = torch.linalg.qr(matrices).Q
        return columns.contiguous()  # in the order of memory of the other branch, which decides how readers round
    for i in range(num_cols):
        col = matrices[:, :, i : i + 1]
        norm = torch.linalg.vector_norm(col, 2, dim=1, keepdim=True)
        col = col / (norm + epsilon if epsilon else norm)
        parts = [matrices[:, :, :i]] if i else []
        parts.append(col)
        if i + 1 < num_cols:
            rest = matrices[:, :, i + 1 :]
            parts.append(rest - torch.sum(col * rest, dim=1, keepdim=True) * col)
        matrices = torch.cat(parts, dim=2) if num_cols > 1 else col
    return matrices


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    flats = [one.reshape(-1) for one in tensors]
    return torch.cat(flats) if len(flats) > 1 else flats[0]
