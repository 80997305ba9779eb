"""Parameters that are cut over the ranks, in a call of a live step: one is gathered where Python wants it whole."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from wholestep.capture.python.user_frame import current_line
from wholestep.capture.reach.train_state import Slot
from wholestep.errors import CaptureError
from wholestep.ir.dtensor.shards import cut, is_dtensor, is_sharded, padded_shard, shard_spec
from wholestep.ir.ops.collectives import group_named
from wholestep.ir.program import MeshAxis


def from_all_ranks(mine: torch.Tensor, axes: Iterable[MeshAxis]) -> list[torch.Tensor]:
    """What each rank of a mesh has, in the order of their numbers. Tensors of one shape and dtype.

    `axes`: those of the mesh, the last one first, as `data_axes` gives them.
    """
    found = mine[None]
    for axis in axes:
        theirs = [torch.empty_like(found) for _ in range(axis.size)]
        dist.all_gather(theirs, found, group=group_named(axis.group))
        found = torch.cat(theirs)
    return list(found.unbind())


def texts_of_all_ranks(mine: str, device: torch.device, axes: Sequence[MeshAxis]) -> list[str]:
    """The text of each rank of a mesh, likewise. `device`: where it travels."""
    own = torch.tensor([*mine.encode()], dtype=torch.uint8, device=device)
    sizes = [int(one) for one in from_all_ranks(torch.tensor([len(own)], device=device), axes)]
    padded = own.new_zeros(max(sizes))
    padded[: len(own)] = own
    rows = from_all_ranks(padded, axes)
    return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, sizes, strict=True)]


def all_reduced(tensor: torch.Tensor, op: Any, axes: Iterable[MeshAxis]) -> torch.Tensor:
    """A tensor reduced over all ranks of a mesh, in place."""
    for axis in axes:
        dist.all_reduce(tensor, op, group=group_named(axis.group))
    return tensor


class ShardedParameters:
    """Those of one live step. Tensors are known to all ranks by number: two for each parameter, it and its gradient."""

    def __init__(self, axes: tuple[MeshAxis, ...]) -> None:
        """`axes`: of the mesh. Parameters are cut over the ranks of the first one."""
        self._axes = axes
        self._params: list[Slot] = []
        self._unreduced: dict[int, torch.Tensor] = {}
        """By place of the parameter the gradients that whole tensors got in a backward, which are this rank's alone."""
        self._keeps_gradients = False
        self._names: list[weakref.ref[DTensor]] = []
        """Other DTensors that Python was given on the memory of a shard, such as its ``.data``."""

    def note_name(self, tensor: DTensor) -> None:
        """Python is given a DTensor that is on the memory of a shard."""
        self._names.append(weakref.ref(tensor))

    def part_names(self, shard: DTensor) -> None:
        """The memory of a shard is about to be that of another tensor: others on it keep what it holds."""
        storage = shard._local_tensor.untyped_storage()._cdata
        for one in (one() for one in self._names):
            if one is not None and one is not shard and one._local_tensor.untyped_storage()._cdata == storage:
                one._local_tensor = one._local_tensor.detach().clone()

    def begin(self, params: Iterable[Slot]) -> None:
        """A call begins. `params`: of the step, in an order that is the same on all ranks."""
        self._params = list(params)
        self._unreduced.clear()
        self._names = [one for one in self._names if one() is not None]

    def number_of(self, tensor: DTensor) -> int | None:
        """The number of a parameter or a gradient, or of what has its memory and layout; None for any other tensor."""
        for place, slot in enumerate(self._params):
            for is_grad, held in enumerate((slot.tensor, slot.tensor.grad)):
                if held is tensor or (is_dtensor(held) and is_same_memory(held, tensor)):
                    return 2 * place + is_grad
        return None

    def name_of(self, number: int) -> str:
        """What a number stands for, in words."""
        return f"{'the gradient of ' if number % 2 else ''}{self._params[number // 2].name}"

    def gathered(self, number: int) -> torch.Tensor | None:
        """All parts of a tensor as one. Every rank comes; None on all of them if one has no such gradient."""
        param = self._params[number // 2].tensor
        held = param.grad if number % 2 else param
        has = torch.tensor([is_dtensor(held)], dtype=torch.int32, device=param.device)
        if not all_reduced(has, dist.ReduceOp.MIN, self._axes).item() or not is_dtensor(held):
            return None
        if (spec := shard_spec(held)) is None:
            return held._local_tensor.detach().clone()
        parts = from_all_ranks(padded_shard(held).contiguous(), self._axes[:1])
        return torch.cat(parts, spec.dim).narrow(spec.dim, 0, held.shape[spec.dim]).contiguous()

    @contextmanager
    def gradients_kept(self) -> Iterator[None]:
        """While open, a backward leaves the gradients of whole tensors here; see `reduce`."""
        self._keeps_gradients = True
        try:
            yield
        finally:
            self._keeps_gradients = False

    def keep_gradient(self, shard: DTensor, grad: torch.Tensor) -> None:
        """Keeps what a whole tensor got in the place of a parameter. Raises CaptureError where no backward adds it."""
        place = next((i for i, slot in enumerate(self._params) if slot.tensor is shard), None)
        if place is None or not self._keeps_gradients:
            raise CaptureError(
                f"{current_line()} asks for the gradient of a parameter that is cut over the ranks and was used "
                f"outside of its module. Use loss.backward(), or compute it in a forward of the module."
            )
        known = self._unreduced.get(place)
        self._unreduced[place] = grad if known is None else known + grad

    def take_gradient(self, shard: DTensor) -> torch.Tensor | None:
        """What is kept for a parameter, which is not kept any longer."""
        place = next((i for i, slot in enumerate(self._params) if slot.tensor is shard), -1)
        return self._unreduced.pop(place, None)

    @property
    def has_gradient(self) -> list[bool]:
        """Of each parameter whether this rank keeps a gradient for it."""
        return [place in self._unreduced for place in range(len(self._params))]

    def reduce(self, anywhere: list[bool], mean_of: Callable[[list[torch.Tensor]], None]) -> None:
        """Adds what ranks keep to ``.grad``. `anywhere`: `has_gradient` of any rank; `mean_of`: over them, in place."""
        for place in (place for place, has in enumerate(anywhere) if has):
            param = self._params[place].tensor
            assert is_sharded(param)
            own = self._unreduced.pop(place, None)
            whole = torch.zeros(param.shape, dtype=param.dtype, device=param.device) if own is None else own.clone()
            mean_of([whole])
            part = cut(whole, param.device_mesh, param.placements)
            if param.grad is None:
                param.grad = part
            else:
                assert is_dtensor(param.grad)
                param.grad._local_tensor.add_(part._local_tensor)


def is_same_memory(one: DTensor, other: DTensor) -> bool:
    """Whether two are the same values in the same order."""
    return _memory(one) == _memory(other)


def _memory(tensor: DTensor) -> tuple[object, ...]:
    local = tensor._local_tensor
    place = (local.untyped_storage()._cdata, local.storage_offset(), local.shape, local.stride())
    return *place, tensor.shape, tensor.placements
