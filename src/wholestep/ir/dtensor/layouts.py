"""DTensors of any placements: this rank's part of one, and what makes a DTensor of a part again."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from wholestep.ir.dtensor.shards import is_dtensor


@dataclass(frozen=True, slots=True)
class DTensorLayout:
    """What makes a DTensor of this rank's part of it."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    """Of the whole tensor, as the next."""
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: DTensor) -> DTensorLayout:
        """That of a DTensor."""
        return cls(tensor.device_mesh, tuple(tensor.placements), tuple(tensor.shape), tuple(tensor.stride()))

    def around(self, local: torch.Tensor) -> DTensor:
        """The DTensor of which `local` is this rank's part. They share memory."""
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=torch.Size(self.shape), stride=self.stride
        )

    def why_uneven(self) -> str:
        """Why ranks may hold parts of several shapes, as the end of a sentence; empty if all have the same."""
        if any(type(one) not in (Shard, Replicate) and not isinstance(one, Partial) for one in self.placements):
            return f"is placed as {self.placements}, which is none of Shard, Replicate and Partial"
        num_parts = Counter[int]()
        for axis, placed in enumerate(self.placements):
            if isinstance(placed, Shard):
                num_parts[placed.dim] = self.mesh.size(axis) * (num_parts[placed.dim] or 1)
        for dim, count in num_parts.items():
            if self.shape[dim] % count:
                return f"is cut along dim {dim} into {count} parts, which are not of one size"
        return ""


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, the very object that it holds; any other tensor itself."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def place_zeros(zeros: DTensor, placements: tuple[Placement, ...]) -> bool:
    """Gives a DTensor of zeros other placements: zeros are the parts of a sum, too. False where parts would be cut."""
    pairs = zip(zeros.placements, placements, strict=True)
    if any(one != other and isinstance(one if isinstance(one, Shard) else other, Shard) for one, other in pairs):
        return False
    zeros._spec = replace(zeros._spec, placements=placements)
    return True
