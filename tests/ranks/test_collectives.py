"""Collectives of the user on real ranks: groups of some ranks, messages, and ranks that do not fit together."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from tests.conformance.collectives.compiled_steps import CALLS, Step, run_both, tensors

pytestmark = pytest.mark.ranks


def plan_of(step: Step) -> str:
    """The plan of a compiled step that equals the eager one, bit for bit."""
    return run_both(step, backend="eager").plan


# ---- groups ------------------------------------------------------------------------------------------------------


def over_both_axes() -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))

    def step(x: Tensor, y: Tensor) -> list[Tensor]:
        a, b = x * 1, y * 1
        dist.all_reduce(a, group=mesh.get_group("inner"))
        dist.broadcast(b, group_src=1, group=mesh.get_group("outer"))
        return [a, b, x * mesh.get_local_rank("inner")]

    return plan_of(step)


def test_mesh_axes_have_one_plan_on_all_ranks(pool4: Any) -> None:
    assert len(set(pool4.run(over_both_axes))) == 1


def over_some_ranks(members: tuple[int, ...]) -> str:
    group = dist.new_group(list(members))

    def step(x: Tensor, y: Tensor) -> Tensor:
        z = x * 2
        if dist.get_rank() in members:
            dist.all_reduce(z, group=group)
        dist.all_reduce(y)
        return z + y

    return plan_of(step)


@pytest.mark.parametrize("members", [(0, 1, 3), (0, 1)], ids=["irregular", "one block of a division"])
def test_a_group_of_some_ranks_is_in_the_plan_of_these(pool4: Any, members: tuple[int, ...]) -> None:
    """The others have no such line in their plan; all of them have the line about the world."""
    plans = pool4.run(over_some_ranks, members)
    assert ["size=3" in plan or "size=2" in plan for plan in plans] == [rank in members for rank in range(4)]
    assert all("size=4" in plan for plan in plans)


# ---- messages ----------------------------------------------------------------------------------------------------


def ring(x: Tensor, y: Tensor) -> Tensor:
    rank, size, received = dist.get_rank(), dist.get_world_size(), torch.empty_like(x)
    calls = [dist.P2POp(dist.isend, x * 2, (rank + 1) % size), dist.P2POp(dist.irecv, received, (rank - 1) % size)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return received + y


def pipeline(x: Tensor, y: Tensor) -> Tensor:
    """Each rank takes from the one before it, computes, and hands on."""
    rank, held = dist.get_rank(), x * 1
    if rank > 0:
        dist.recv(held, rank - 1)
    held = torch.tanh(held) + y
    if rank < dist.get_world_size() - 1:
        dist.send(held, rank + 1)
    return held


def crossing(x: Tensor, y: Tensor) -> list[Tensor]:
    """Two messages each way, told apart by their tags, received in the other order."""
    rank, first, second = dist.get_rank(), torch.empty_like(x), torch.empty_like(x)
    peer = rank ^ 1
    works = [dist.isend(x, peer, tag=1), dist.isend(y, peer, tag=2)]
    works += [dist.irecv(second, peer, tag=2), dist.irecv(first, peer, tag=1)]
    for work in works:
        work.wait()
    return [first, second]


@pytest.mark.parametrize("step", [ring, pipeline, crossing])
def test_messages_equal_eager_code(pool4: Any, step: Any) -> None:
    plans = pool4.run(plan_of, step)
    assert len(set(plans)) > 1, "each rank has the messages it takes part in"


# ---- beside a strategy -------------------------------------------------------------------------------------------


def trained() -> str:
    torch.manual_seed(0)
    eager, ours = (copy.deepcopy(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))) for _ in range(2))
    ours.load_state_dict(eager.state_dict())
    opts = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (eager, ours)]

    def step(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = (model(x) - y).square().mean()
        loss.backward()
        metric = loss.detach().clone()
        work = dist.all_reduce(metric, dist.ReduceOp.MAX, async_op=True)
        opt.step()
        opt.zero_grad()
        work.wait()
        return metric

    wrapped = DistributedDataParallel(eager)
    compiled = ws.compile(step, strategy=ws.DDP(), backend="eager", fullgraph=True)
    for call in range(CALLS):
        wanted, found = step(wrapped, opts[0], *tensors(call)), compiled(ours, opts[1], *tensors(call))
        assert torch.equal(wanted, found)
        assert all(map(torch.equal, eager.parameters(), ours.parameters()))
    return compiled.plan


def test_a_metric_reduced_in_a_data_parallel_step_stays_out_of_the_buckets(pool2: Any) -> None:
    first, second = pool2.run(trained)
    assert first == second
    assert "all_reduce float32[1] max axis=data size=2" in first
    assert "members: " in first, "gradients are in buckets; the metric is in none"


def rows_of_all(x: Tensor, y: Tensor) -> Tensor:
    """A loss over the rows of all ranks: what each counts is a constant while tracing, their sum is none."""
    rows = torch.tensor([float(len(x))])
    dist.all_reduce(rows)
    return (x - y).square().sum() / rows.item() + len(x)


def counted() -> str:
    compiled = ws.compile(rows_of_all, backend="eager", fullgraph=True)
    for call, rows in enumerate([(4, 4), (4, 5), (6, 5), (6, 7)]):  # a rank that traces alone must send nothing
        given = tensors(call, rows[dist.get_rank()])
        assert torch.equal(compiled(*given), rows_of_all(*given))
    return compiled.plan


def test_a_constant_that_has_travelled_is_none(pool2: Any) -> None:
    for plan in pool2.run(counted):
        assert "all_reduce" in plan


# ---- ranks that do not fit together ------------------------------------------------------------------------------


def one_rank_leaves_out(x: Tensor, y: Tensor) -> Tensor:
    if dist.get_rank() == 0:
        dist.all_reduce(x)
    return x + y


def nobody_receives(x: Tensor, y: Tensor) -> Tensor:
    if dist.get_rank() == 0:
        dist.send(x, 1)
    return x + y


def sizes_differ(x: Tensor, y: Tensor) -> Tensor:
    if dist.get_rank() == 0:
        dist.send(x, 1)
    if dist.get_rank() == 1:
        dist.recv(y[:2], 0)
    return x + y


def mismatched(step: Any) -> str:
    with pytest.raises(ws.RankMismatchError) as caught:
        ws.compile(step, fullgraph=True)(*tensors(0))
    return str(caught.value)


@pytest.mark.parametrize("step", [one_rank_leaves_out, nobody_receives, sizes_differ])
def test_what_would_hang_is_an_error_on_every_rank(pool2: Any, step: Any) -> None:
    first, second = pool2.run(mismatched, step)
    assert first == second
    assert "float32[24]" in first
