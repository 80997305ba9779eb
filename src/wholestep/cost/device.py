"""What a device reaches: ceilings of its kernels by kind, and what the host pays to drive it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from wholestep.cost.compute import Kind, Work
from wholestep.cost.curve import Curve

_HOST_ONLY = (Kind.VIEW, Kind.NUMBER)
_BY_BYTES = (Kind.POINTWISE, Kind.IN_PLACE, Kind.REDUCTION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What a device reaches, and what the host pays to drive it."""

    curves: Mapping[str, Curve]
    """Time of one kernel by its amount of work (see `Kind`), under the name of its kind, or ``kind/dtype`` where the
    dtype decides. "pointwise" must be there: it is the ceiling of memory, in bytes. A kind without a curve is bound
    by memory alone. The first point of a curve is the floor of its kernels."""
    host_us_per_op: float
    """What the eager backend pays for a call of an operator, in Python and the dispatcher."""
    host_us_per_view: float
    """The same for an operator that computes nothing."""
    host_us_per_number: float
    """The same for arithmetic of Python and for picking one result out of several."""
    host_is_device: bool
    """Host and device are one thread (the CPU), so their times add up; else the host runs ahead."""
    us_per_listed_tensor: float = 0.0
    """What each tensor of a list costs beyond its bytes, where a list is a loop (the CPU). 0 where a list is one
    kernel."""

    @property
    def lists_are_loops(self) -> bool:
        """Whether an operator on lists of tensors takes them one by one."""
        return self.us_per_listed_tensor > 0

    def host_us(self, kinds: Sequence[Work]) -> float:
        """Time on the host for a node of these kernels."""
        if not kinds:
            return 0.0
        match kinds[0].kind:
            case Kind.NUMBER:
                return self.host_us_per_number
            case Kind.VIEW:
                return self.host_us_per_view
            case _:
                return self.host_us_per_op

    def device_us(self, kernels: Sequence[Work]) -> float:
        """Time on the device for a node of these kernels."""
        busy = [work for work in kernels if work.kind not in _HOST_ONLY]
        if len(busy) < 2:
            return sum(map(self.kernel_us, busy))
        if self.lists_are_loops:
            return sum(self.us_per_listed_tensor + self.kernel_us(work) for work in busy)
        return self.kernel_us(
            replace(busy[0], amount=sum(w.amount for w in busy), num_bytes=sum(w.num_bytes for w in busy))
        )

    def kernel_us(self, work: Work) -> float:
        """Time of one kernel: the slower of its arithmetic and its memory (note *roofline*)."""
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
