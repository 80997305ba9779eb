"""Ranks of this process as inputs of the graph, and group names that all ranks share.

[Note: a rank is a symbol]
``dist.get_rank()`` and its relatives give the user's code a symbolic number: what it computes with it is a node, so
the text of the graph is that of every other rank. Where Python wants to know (``if rank == 0``, ``parts[rank]``, a
name of a file) the number is what it is; that needs no guard, as it never changes in a process. torch's own code, and
other threads, get the plain number.

[Note: names of groups]
Torch names a group by a counter, which differs from rank to rank. A group whose ranks are `size` numbers with the
distance `stride`, as every axis of a mesh gives them, is one block of a division of the whole world. Size and stride
say which block each rank is in, so a name made of them is the same and means the same everywhere.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.fx as fx
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from wholestep.capture.python.code_owner import library_frame
from wholestep.capture.scalars.host_scalars import HostValues
from wholestep.capture.scalars.tensor_indexing import indexing_replaced
from wholestep.ir import op_info
from wholestep.ir.ops.collectives import BARRIER
from wholestep.ir.program import Input, InputKind, MeshAxis
from wholestep.util.lazy_import import lazy_import

if TYPE_CHECKING:
    from torch._dynamo import source
else:  # it takes as long to import as half of torch, and only a capture on several ranks needs it
    source = lazy_import("torch._dynamo.source")


@dataclass(frozen=True, slots=True)
class Rank:
    """The number of this process in one group."""

    axis: MeshAxis
    group: Any
    number: int


def ranks() -> list[Rank]:
    """One per group that this process is in, in the order in which they were made, which all ranks share."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    seen: Counter[tuple[str, int]] = Counter()
    found = []
    for group in distributed_c10d._world.pg_group_ranks:
        members = tuple(dist.get_process_group_ranks(group))
        if dist.get_rank() not in members:
            continue
        name, divides = _name_of(members, dist.get_rank(), dist.get_world_size())
        seen[name, len(members)] += 1
        if (number := seen[name, len(members)]) > 1:
            name = f"{name} #{number}"
        axis = MeshAxis(name=name, size=len(members), group=group.group_name, ranks=None if divides else members)
        found.append(Rank(axis, group, members.index(dist.get_rank())))
    return found


def _name_of(members: tuple[int, ...], own: int, world: int) -> tuple[str, bool]:
    """A name for the group, and whether it is one block of a division of the world that the name defines."""
    size = len(members)
    if members == tuple(range(world)):
        return "world", True
    stride = members[1] - members[0] if size > 1 else 1
    if stride > 0 and world % (size * stride) == 0:
        first = own // (size * stride) * (size * stride) + own % stride
        if members == tuple(range(first, first + size * stride, stride)):
            return f"stride {stride}", True
    return f"ranks {'+'.join(map(str, members))}", False


def axes_of(graph: fx.Graph, known: list[Rank]) -> tuple[MeshAxis, ...]:
    """The groups that the graph communicates over, in the order of first use."""
    by_group = {rank.axis.group: rank.axis for rank in known}
    nodes = (node for node in graph.nodes if op_info.is_collective(node) or node.target is BARRIER)
    names = dict.fromkeys(str(node.args[-1]) for node in nodes)
    return tuple(by_group[name] for name in names if name in by_group)


def rank_inputs(known: list[Rank]) -> list[Input]:
    """What the last placeholders of a trace mean."""
    return [Input(kind=InputKind.RANK, name=f"rank.{rank.axis.name}", shape=(), dtype=torch.int64) for rank in known]


class RankSymbols:
    """The symbols of one trace, one per group, and what gives them to the user's code."""

    def __init__(self, shape_env: ShapeEnv) -> None:
        self.ranks = ranks()
        self.symbols: list[Any] = [
            shape_env.create_unspecified_symint_and_symbol(
                rank.number, source.ConstantSource(f"rank_{index}"), DimDynamic.DYNAMIC
            )
            for index, rank in enumerate(self.ranks)
        ]
        self._by_group = {rank.axis.group: symbol for rank, symbol in zip(self.ranks, self.symbols, strict=True)}
        self._thread = threading.get_ident()

    def patches(self, values: Callable[[], HostValues | None]) -> Iterator[Any]:
        """What to replace while the step is traced. `values` knows the numbers behind symbols."""
        if not self.ranks:
            return
        get_rank: Any = dist.get_rank
        scope = get_rank.__globals__
        plain = _copy_of(get_rank)
        # The function itself is changed, and not a name of it: a step may have imported it by any name.
        yield patch.dict(scope, {"_wholestep_get_rank": lambda group: self._of(group, plain(group))})
        yield _code_of(get_rank, _get_rank)
        kinds = {type(rank.group) for rank in self.ranks}
        for kind in {dist.ProcessGroup, *(kind for kind in kinds if "rank" in vars(kind))}:
            original = vars(kind)["rank"]
            yield patch.object(kind, "rank", lambda group, original=original: self._of(group, original(group)))
        yield patch.object(DeviceMesh, "get_rank", lambda mesh: self._of(None, plain()))
        yield from self._mesh_patches()
        for name in ("__int__", "__index__", "__hash__", "__str__", "__format__"):
            yield patch.object(torch.SymInt, name, _plain_number(getattr(torch.SymInt, name), name, values))
        yield indexing_replaced(_symbolic_index(torch.Tensor.__getitem__))

    def _mesh_patches(self) -> Iterator[Any]:
        local, coordinate = DeviceMesh.get_local_rank, DeviceMesh.get_coordinate

        def get_local_rank(mesh: DeviceMesh, mesh_dim: int | str | None = None) -> Any:
            return self._of(mesh.get_group(mesh_dim), local(mesh, mesh_dim))

        def get_coordinate(mesh: DeviceMesh) -> Any:
            found = coordinate(mesh)
            if found is None or not _from_the_user():
                return found
            return type(found)(self._symbol(mesh.get_group(dim), number) for dim, number in enumerate(found))

        yield patch.object(DeviceMesh, "get_local_rank", get_local_rank)
        yield patch.object(DeviceMesh, "get_coordinate", get_coordinate)

    def _of(self, group: Any, number: int) -> Any:
        """What the caller gets for the number of this process in `group`."""
        return self._symbol(group, number) if _from_the_user() else number

    def _symbol(self, group: Any, number: int) -> Any:
        if threading.get_ident() != self._thread:
            return number
        name = getattr(group or dist.group.WORLD, "group_name", "")
        return self._by_group.get(name, number)  # a process outside of the group has no number in it but -1


def _get_rank(group: Any = None) -> Any:
    return _wholestep_get_rank(group)  # type: ignore[name-defined]  # noqa: F821  # runs among torch's own names


@contextmanager
def _code_of(function: Any, other: Any) -> Iterator[None]:
    """While open, `function` runs the code of `other`."""
    code, function.__code__ = function.__code__, other.__code__
    try:
        yield
    finally:
        function.__code__ = code


def _copy_of(function: Any) -> Any:
    return type(function)(function.__code__, function.__globals__, function.__name__, function.__defaults__)


def _from_the_user() -> bool:
    """Whether the innermost function outside of this file and of what stands for ``get_rank`` is not torch's."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return not library_frame(frame.f_code.co_filename)


def _plain_number(original: Any, name: str, values: Callable[[], HostValues | None]) -> Any:
    """A method of symbolic numbers that Python calls when it wants a number or a text."""

    def method(symbol: Any, *args: Any) -> Any:
        host = values()
        known = None if host is None else host.number(symbol)
        return original(symbol, *args) if known is None else getattr(int, name)(known, *args)

    return method


def _symbolic_index(original: Any) -> Any:
    """``tensor[rank]`` as an operator that takes a symbol: indexing itself would look at its value."""

    def get(tensor: torch.Tensor, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        symbolic = any(isinstance(part, torch.SymInt) for part in parts)
        if not symbolic or not all(isinstance(part, (int, slice, torch.SymInt)) for part in parts):
            return original(tensor, index)
        dim = 0
        for part in parts:
            if isinstance(part, slice):
                tensor = original(tensor, (*[slice(None)] * dim, part))
                dim += 1
            else:
                tensor = tensor.select(dim, part)
        return tensor

    return get
