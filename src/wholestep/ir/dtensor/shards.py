"""Shards: what a graph takes of a live DTensor, and the DTensor of what a graph gives.

[Note: padded shards]
A graph has the same shapes on every rank, so shards are padded at their end to the length of the first one. The padding
lies after the rank's own values in the same memory: the DTensor's local tensor is a view of the padded shard. Memory
of `fully_shard` has room for it already; a local tensor that has none is moved once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from wholestep.errors import ConfigError
from wholestep.ir.program import ShardSpec

UNNAMED_AXIS = "data"
"""What the axis of a mesh without names is called."""

SLOTS = (DTensor._local_tensor, DTensor._spec)
"""Where a DTensor object holds what it stands for: descriptors, for the native guard."""


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor, sharded or replicated."""
    return isinstance(tensor, DTensor)


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor, of which this rank holds a shard."""
    return isinstance(tensor, DTensor) and not all(isinstance(one, Replicate) for one in tensor.placements)


def shard_spec(tensor: torch.Tensor) -> ShardSpec | None:
    """How a tensor is cut; None for a plain one. Raises ConfigError for layouts other than one ``Shard(dim)``."""
    if not is_sharded(tensor):
        return None
    axis, dim = _sharded_axis(tensor.placements, tensor.device_mesh)
    names = tensor.device_mesh.mesh_dim_names
    return ShardSpec(
        axis=names[axis] if names else UNNAMED_AXIS, num_ranks=tensor.device_mesh.size(axis), dim=dim,
        whole_shape=tuple(tensor.shape),
    )  # fmt: skip


def local_value(tensor: DTensor) -> torch.Tensor:
    """What a graph takes of a DTensor: the padded shard of this rank, or all of a replicated one."""
    return padded_shard(tensor) if is_sharded(tensor) else tensor._local_tensor.detach()


def padded_shard(tensor: DTensor) -> torch.Tensor:
    """The part of this rank, padded: shape `ShardSpec.shard_shape`. Its first values are the memory of the DTensor."""
    spec, local = shard_spec(tensor), tensor._local_tensor
    assert spec is not None
    if tuple(local.shape) == spec.shard_shape:
        return local.detach()
    strides = torch.empty(spec.shard_shape, device="meta").stride()
    num_bytes = (local.storage_offset() + _product(spec.shard_shape)) * local.element_size()
    if spec.dim == 0 and local.untyped_storage().nbytes() >= num_bytes and local.is_contiguous():
        return local.detach().as_strided(spec.shard_shape, strides, local.storage_offset())
    held = local.new_zeros(spec.shard_shape)
    own = held.narrow(spec.dim, 0, local.shape[spec.dim])
    own.copy_(local.detach())
    tensor._local_tensor = own
    return held


def dtensor_maker(spec: ShardSpec, mesh: DeviceMesh) -> Callable[[torch.Tensor], DTensor]:
    """What makes a DTensor, cut as `spec` says, of a padded part, whose values it shares. All parts have one dtype.

    ``from_local`` takes 0.3 ms (torch 2.11) to 0.8 (2.13) on a CPU, and a call may give hundreds: what it finds out is
    kept from the first one.
    """
    names = mesh.mesh_dim_names or (UNNAMED_AXIS,)
    axis = names.index(spec.axis)
    length = local_length(spec.whole_shape[spec.dim], spec.num_ranks, mesh.get_local_rank(axis))
    placements = tuple(Shard(spec.dim) if one == axis else Replicate() for one in range(mesh.ndim))
    shape, stride = torch.Size(spec.whole_shape), torch.empty(spec.whole_shape, device="meta").stride()
    found: list[Any] = []

    def make(local: torch.Tensor) -> DTensor:
        own = local.narrow(spec.dim, 0, length)
        if found:
            return DTensor(own, found[0], requires_grad=False)
        made = DTensor.from_local(own, mesh, placements, run_check=False, shape=shape, stride=stride)
        if _is_made_of(own, made._spec):
            found.append(made._spec)
        return made

    return make


def _is_made_of(own: torch.Tensor, spec: Any) -> bool:
    """Whether this torch makes a DTensor of a part and of how it is cut."""
    try:
        made = DTensor(own, spec, requires_grad=False)
        return made._spec is spec and made._local_tensor is own and not made.requires_grad
    except (TypeError, AttributeError):
        return False


def cut(whole: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    """This rank's part of a tensor that every rank holds, in memory of its own with room for the padding."""
    made = zero_shard(whole.shape, whole.dtype, whole.device, mesh, placements, stride=whole.stride())
    made._local_tensor.copy_(own_part(whole, mesh, placements))
    return made


def own_part(whole: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> torch.Tensor:
    """This rank's part of a tensor that every rank holds: a view, without gradient."""
    axis, dim = _sharded_axis(placements, mesh)
    length, num_ranks, rank = whole.shape[dim], mesh.size(axis), mesh.get_local_rank(axis)
    first = min(rank * -(-length // num_ranks), length)
    return whole.detach().narrow(dim, first, local_length(length, num_ranks, rank))


def zero_shard(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, mesh: DeviceMesh, placements: tuple[Placement, ...],
    *, stride: tuple[int, ...] | None = None,
) -> DTensor:  # fmt: skip
    """This rank's part of a tensor of zeros, in memory of its own with room for the padding."""
    axis, dim = _sharded_axis(placements, mesh)
    num_ranks = mesh.size(axis)
    spec = ShardSpec(axis="", num_ranks=num_ranks, dim=dim, whole_shape=tuple(shape))
    held = torch.zeros(spec.shard_shape, dtype=dtype, device=device)
    own = held.narrow(dim, 0, local_length(shape[dim], num_ranks, mesh.get_local_rank(axis)))
    stride = torch.empty(shape, device="meta").stride() if stride is None else stride
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=shape, stride=stride)


def local_length(length: int, num_ranks: int, rank: int) -> int:
    """How much of a dim of some length a rank holds: as ``torch.chunk`` cuts it."""
    longest = -(-length // num_ranks)
    return max(0, min(longest, length - rank * longest))


def default_dim(shape: tuple[int, ...], num_ranks: int) -> int:
    """The dim along which a tensor is cut where nobody says another: the first, unless it is shorter than the ranks are
    many and a later one divides."""
    if shape[0] >= num_ranks:
        return 0
    return next((dim for dim, size in enumerate(shape) if size % num_ranks == 0 and size), 0)


def replicated_and(dim: int, mesh: DeviceMesh) -> tuple[Placement, ...]:
    """Placements that cut `dim` over the last axis of a mesh and repeat the parts over all others."""
    return (*(Replicate() for _ in range(mesh.ndim - 1)), Shard(dim))


def _sharded_axis(placements: tuple[Placement, ...], mesh: DeviceMesh) -> tuple[int, int]:
    """The one axis over which a tensor is cut, and the dim."""
    cuts = [(axis, one.dim) for axis, one in enumerate(placements) if isinstance(one, Shard)]
    others = [one for one in placements if not isinstance(one, (Shard, Replicate))]
    if len(cuts) != 1 or others:
        raise ConfigError(
            f"A DTensor of the step has the placements {placements} on the mesh {mesh}. Tensors that are cut along one "
            f"dim over one axis of the mesh, and equal over the others, can be compiled: what fully_shard makes."
        )
    return cuts[0]


def _product(shape: tuple[int, ...]) -> int:
    number = 1
    for size in shape:
        number *= size
    return number
