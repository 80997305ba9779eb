"""Device: ceilings of its kernels by kind, and the host time that a call costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from wholestep.cost.curve import Curve
from wholestep.cost.flops import Kind, Work

TUNED = "tuned_"
"""Before the name of a curve: of kernels for which a compiler may choose among libraries."""

_HOST_ONLY = (Kind.VIEW, Kind.NUMBER)
_BY_BYTES = (Kind.POINTWISE, Kind.IN_PLACE, Kind.REDUCTION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What a device reaches, and what the host pays to drive it."""

    curves: Mapping[str, Curve]
    """Time of one kernel by its amount of work (see `Kind`), under the name of its kind, or ``kind/dtype`` where the
    dtype decides. "pointwise" must be there: it is the ceiling of memory, in bytes. A kind without a curve is bound
    by memory alone. The first point of a curve is the floor of its kernels."""
    calls_us: Mapping[str, float]
    """What the eager backend pays on the host for a call, in Python, the dispatcher and the launch, under the name of
    the kind. "pointwise", "view" and "number" must be there; a kind without one costs as much as "pointwise"."""
    us_per_listed_tensor: float
    """What each tensor of a list costs the host besides."""
    host_is_device: bool
    """Host and device are one thread (the CPU), so their times add up, and an operator on lists of tensors takes them
    one by one; else the host runs ahead, and a list is one kernel."""

    def tuned(self) -> Device:
        """With kernels as they are where the faster one of several libraries runs them, as far as that was measured."""
        return replace(self, curves={name: self.curves.get(TUNED + name, one) for name, one in self.curves.items()})

    def host_us(self, kernels: Sequence[Work], num_listed: int = 0) -> float:
        """Time on the host for a node of these kernels, with so many tensors in its longest list."""
        if not kernels:
            return 0.0
        call_us = self.calls_us.get(kernels[0].kind, self.calls_us[Kind.POINTWISE])
        return call_us + num_listed * self.us_per_listed_tensor

    def device_us(self, kernels: Sequence[Work], *, apart: bool = False) -> float:
        """Time on the device for a node of these kernels. `apart`: they are no list, which a GPU takes as one."""
        busy = [work for work in kernels if work.kind not in _HOST_ONLY]
        if len(busy) < 2 or self.host_is_device or apart:
            return sum(map(self.kernel_us, busy))
        return self.kernel_us(
            replace(busy[0], amount=sum(w.amount for w in busy), num_bytes=sum(w.num_bytes for w in busy))
        )

    def kernel_us(self, work: Work) -> float:
        """Time of one kernel: the slower of its arithmetic and its memory (note *roofline*)."""
        if work.within:
            within_us = sum(self.curves[one.kind].us(one.amount) for one in work.within if one.kind in self.curves)
            return max(within_us, self.kernel_us(replace(work, within=())))
        curve, amount = self.curves.get(work.kind), work.amount
        if work.dtype is not None and (curve := self.curves.get(f"{work.kind}/{dtype_name(work.dtype)}")) is None:
            # No ceiling of this dtype: that of float32, of which as many numbers fit into the same registers.
            curve, amount = self.curves.get(f"{work.kind}/float32"), amount * max(1.0, work.dtype.itemsize / 4)
        if curve is not None and work.kind in _BY_BYTES:
            return curve.us(amount)
        memory_us = self.curves[Kind.POINTWISE].us(work.num_bytes)
        return memory_us if curve is None else max(memory_us, curve.us(amount))


def dtype_name(dtype: torch.dtype) -> str:
    """``float32``"""
    return str(dtype).removeprefix("torch.")
