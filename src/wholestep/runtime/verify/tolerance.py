"""Distances between two values, and the largest that rounding explains.

Note: what may differ
    Passes keep the arithmetic of every element, so nothing may differ, with one exception: a norm that is put together
    from norms of parts adds the same terms in another order. A sum of n terms of one sign, added in pairs, is off by at
    most ``log2(n)`` roundings of half an eps. So for n up to 2**32 two orders are at most `REORDERED` times eps apart,
    as a share of the value or, for what is updated, of the update; storing the update adds a rounding on each side.
    Source: Higham, "Accuracy and Stability of Numerical Algorithms", 2002, section 4.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from wholestep.capture.functionalize.storage_resize import is_freed

REORDERED = 32
"""Roundings in which two orders of a sum of terms of one sign may differ; see above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Two values that are not equal: where they are farthest apart, and how far."""

    index: tuple[int, ...]
    got: float
    wanted: float
    distance: float
    """Largest absolute difference of an element; infinite where shapes, types or what is finite differ."""
    allowed: float
    """Largest distance that another order of additions explains."""

    @property
    def is_fault(self) -> bool:
        """Whether rounding does not explain it."""
        return not self.distance <= self.allowed


def gap(got: Any, wanted: Any, old: torch.Tensor | None = None) -> Gap | None:
    """How far `got` is from `wanted`; None where they are equal, NaN being equal to NaN.

    Numbers and tensors of any dtype, also lists of them (then: the first pair that is a fault, else the first that
    differs). `old` is the value before an update, of which `wanted` is the result.
    """
    if isinstance(wanted, (list, tuple)) and isinstance(got, (list, tuple)):
        if len(got) != len(wanted):
            return _unlike()
        gaps = [one for a, b in zip(got, wanted, strict=True) if (one := gap(a, b)) is not None]
        return next((one for one in gaps if one.is_fault), gaps[0] if gaps else None)
    if isinstance(wanted, torch.Tensor) and isinstance(got, torch.Tensor):
        return _tensor_gap(got.detach(), wanted.detach(), old)
    if isinstance(wanted, (int, float)) and isinstance(got, (int, float)):
        return _number_gap(got, wanted)
    return None if type(got) is type(wanted) else _unlike()


def _number_gap(got: float, wanted: float) -> Gap | None:
    if got == wanted or (got != got and wanted != wanted):
        return None
    return Gap(index=(), got=got, wanted=wanted, distance=abs(got - wanted), allowed=0.0)


def _tensor_gap(got: torch.Tensor, wanted: torch.Tensor, old: torch.Tensor | None) -> Gap | None:
    if got.shape != wanted.shape or got.dtype != wanted.dtype or got.layout != wanted.layout:
        return _unlike()
    if is_freed(got) or is_freed(wanted):
        return None if is_freed(got) and is_freed(wanted) else _unlike()
    if wanted.layout is not torch.strided:
        got, wanted = got.to_dense(), wanted.to_dense()
    if torch.equal(got, wanted):
        return None
    allowed = 0.0
    if wanted.is_floating_point() or wanted.is_complex():
        eps = torch.finfo(wanted.dtype).eps
        allowed = REORDERED * eps * largest(wanted)
        if old is not None:
            allowed = REORDERED * eps * float(distances(wanted, old).max()) + 2 * eps * largest(wanted)
    found = farthest(got, wanted, allowed)
    return found if found.distance else None


def farthest(got: torch.Tensor, wanted: torch.Tensor, allowed: float) -> Gap:
    """The gap between two tensors of one shape where it is widest; `allowed` is the distance that may be."""
    far = distances(got, wanted)
    if not far.numel():
        return Gap(index=(), got=0.0, wanted=0.0, distance=0.0, allowed=allowed)
    place = int(far.argmax())
    index = tuple(int(one) for one in torch.unravel_index(torch.tensor(place, device="cpu"), wanted.shape))
    values = _number(got[index]), _number(wanted[index])
    return Gap(index=index, got=values[0], wanted=values[1], distance=float(far[place]), allowed=allowed)


def _number(element: torch.Tensor) -> float:
    return float(element.abs()) if element.is_complex() else float(element)


def _unlike() -> Gap:
    return Gap(index=(), got=math.nan, wanted=math.nan, distance=math.inf, allowed=0.0)


def distances(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Absolute difference of each element, float64, flat. Equal infinities and NaNs are 0 apart, others infinitely."""
    kind = torch.complex128 if a.is_complex() else torch.float64
    one, other = a.detach().reshape(-1).to(kind), b.detach().reshape(-1).to(kind)
    same = (one == other) | (one.isnan() & other.isnan())
    return torch.where(same, 0.0, (one - other).abs()).nan_to_num(nan=math.inf, posinf=math.inf)


def largest(tensor: torch.Tensor) -> float:
    """Largest absolute value among the finite elements; 0 if there is none."""
    finite = tensor.detach().abs().nan_to_num(nan=0.0, posinf=0.0)
    return float(finite.max()) if finite.numel() else 0.0
