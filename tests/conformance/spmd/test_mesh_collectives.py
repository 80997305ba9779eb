"""Collectives over the axes of a mesh, in traced graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental.proxy_tensor import make_fx

from tests.conformance.spmd.train_step import assert_equal_on_all, row
from wholestep.runtime.distributed.world import init
from wholestep.spmd import CommTensor


def over_axes(collective: str, shape: tuple[int, ...]) -> list[str]:
    """Traces `collective` once per axis with one input and runs the graph with another; what came out wrong."""
    world = init()
    mesh = DeviceMesh(world.device.type, torch.arange(world.size).reshape(shape))
    wrong = []
    for axis, group in enumerate(mesh.get_all_groups()):
        ranks = dist.get_process_group_ranks(group)
        own = torch.ones(3, 3, device=world.device) * world.rank
        found, expected = COLLECTIVES[collective](own, mesh, axis, ranks)
        for one, value in zip(found, expected, strict=True):
            if not torch.equal(one, torch.full_like(own, value)):
                wrong.append(f"axis {axis} of {shape}, ranks {ranks}: wanted {value}, got {one.flatten().tolist()}")
    return wrong


Found = tuple[Sequence[Tensor], Sequence[float]]


def mesh_all_reduce(own: Tensor, mesh: DeviceMesh, axis: int, ranks: list[int]) -> Found:
    def reduce(tensor: Tensor) -> Tensor:
        return funcol.all_reduce(tensor, "sum", group=(mesh, axis)) * 1

    return [make_fx(reduce)(own + 1)(own.clone())], [sum(ranks)]


def mesh_broadcast(own: Tensor, mesh: DeviceMesh, axis: int, ranks: list[int]) -> Found:
    def broadcast(tensor: Tensor) -> Tensor:
        received = CommTensor(tensor.clone())
        dist.broadcast(received, ranks[0], group=mesh.get_group(axis))
        return received * 1

    return [make_fx(broadcast)(own + 1)(own)], [ranks[0]]


def mesh_scatter(own: Tensor, mesh: DeviceMesh, axis: int, ranks: list[int]) -> Found:
    def scatter(receive: Tensor, give: list[Tensor]) -> Tensor:
        received, given = CommTensor(receive), [CommTensor(one) for one in give]
        root = mesh.get_local_rank(axis) == 0
        dist.scatter(received, given if root else None, src=ranks[0], group=mesh.get_group(axis))
        return received * 1

    give = [torch.ones_like(own) * rank for rank in ranks]
    traced, receive = make_fx(scatter)(torch.empty_like(own), [one + 1 for one in give]), torch.empty_like(own)
    found, (rank,) = traced(receive, give), {int(own[0, 0])}
    return [found, receive], [rank, rank]  # in place: the tensor that was wrapped holds the result, too


def mesh_all_gather(own: Tensor, mesh: DeviceMesh, axis: int, ranks: list[int]) -> Found:
    def gather(tensor: Tensor) -> list[Tensor]:
        gathered = funcol.all_gather_tensor(tensor, gather_dim=0, group=(mesh, axis))
        return list(torch.chunk(gathered, len(ranks)))

    return make_fx(gather)(own + 1)(own), ranks


COLLECTIVES: dict[str, Callable[..., Found]] = {
    "tracing_all_reduce_nd": mesh_all_reduce,
    "broadcast_nd": mesh_broadcast,
    "scatter_nd": mesh_scatter,
    "all_gather_nd": mesh_all_gather,
}
over = pytest.mark.parametrize("name", [pytest.param(name, marks=row("S2", name)) for name in COLLECTIVES])


@over
def test_collectives_over_a_2d_mesh_give_each_axis_its_own(ranks4: Any, name: str) -> None:
    assert_equal_on_all(ranks4, over_axes, name, (2, 2))


@over
def test_collectives_over_a_3d_mesh_give_each_axis_its_own(pool8: Any, name: str) -> None:
    assert_equal_on_all(pool8, over_axes, name, (2, 2, 2))
