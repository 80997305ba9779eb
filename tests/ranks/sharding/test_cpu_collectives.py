"""Collectives on CPUs that run in the place of torch's: one message, the bits of torch's own, no long name."""

from __future__ import annotations

import collections
import time
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

import wholestep as ws
from wholestep.ir import op_info
from wholestep.ir.ops.collectives import ALL_GATHER_INTO
from wholestep.lower.base import cpu_collectives
from wholestep.lower.base.cpu_collectives import (
    all_gather,
    all_gather_into,
    all_gather_together,
    reduce_scatter_together,
)

pytestmark = pytest.mark.ranks

SHAPES = ([(4, 3), (8,), (4, 2, 2)], [(4, 3)], [(4, 0), (4, 1)])


def together(dtype: torch.dtype, mixed: bool) -> None:
    world = ws.init()
    group = dist.group.WORLD.group_name
    for shapes in SHAPES:
        generator = torch.Generator().manual_seed(world.rank)
        tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        if mixed:
            tensors[0] = tensors[0].double()
        started = op_info.c10d.reduce_scatter_tensor_coalesced(tensors, "sum", world.size, group)
        wanted = [op_info.WAIT(one) for one in started]
        found = [op_info.WAIT(one) for one in reduce_scatter_together(tensors, "sum", world.size, group)]
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
            assert mine.is_contiguous()
        storages = {one.untyped_storage()._cdata for one in found}
        assert len(storages) == len(found)  # nobody meets another gradient's memory, or its version


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_parts_are_torchs(pool2: Any, dtype: torch.dtype, mixed: bool) -> None:
    pool2.run(together, dtype, mixed)


def shards_of(rank: int, shapes: list[tuple[int, ...]], dtypes: tuple[torch.dtype, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(one, generator=generator).to(dtypes[at % len(dtypes)]) for at, one in enumerate(shapes)]


def gathers(dtypes: tuple[torch.dtype, ...]) -> None:
    world = ws.init()
    group = dist.group.WORLD.group_name
    for shapes in (*SHAPES, [(3, 0)]):
        of_ranks = [shards_of(rank, shapes, dtypes) for rank in range(world.size)]
        shards = of_ranks[world.rank]
        wanted = [torch.cat(rows) for rows in zip(*of_ranks, strict=True)]
        wholes, inside = [torch.full_like(one, 7) for one in wanted], []
        for one, shard in zip(wholes, shards, strict=True):  # a shard may lie in its whole tensor
            inside.append(one.chunk(world.size)[world.rank].copy_(shard))
        begun = [
            [all_gather(one, world.size, group) for one in shards],
            all_gather_together(shards, world.size, group),
            all_gather_into(inside, wholes, world.size, group),
        ]
        assert all(one is other for one, other in zip(begun[2], wholes, strict=True))
        found = [[op_info.WAIT(one) for one in tensors[::-1]][::-1] for tensors in begun]
        for tensors in found:
            for mine, theirs in zip(tensors, wanted, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
                assert mine.is_contiguous()


@pytest.mark.parametrize(
    "dtypes", [(torch.float32,), (torch.bfloat16,), (torch.complex64, torch.bool, torch.float64)], ids=str
)
def test_shards_of_all_ranks_are_gathered(pool2: Any, dtypes: tuple[torch.dtype, ...]) -> None:
    pool2.run(gathers, dtypes)


def loses_a_rank() -> str:
    world = ws.init()
    shards = [torch.ones(2), torch.ones(3)]
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1)).group_name
    if world.rank:
        time.sleep(2)
        return ""
    started = all_gather_together(shards, world.size, group)
    for one in started:
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            op_info.WAIT(one)
    return "raised"


def test_the_wait_raises_what_gloo_raises(pool2: Any) -> None:
    assert pool2.run(loses_a_rank) == ["raised", ""]


def messages_of_a_step() -> collections.Counter[str]:
    ws.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    @ws.compile(strategy=ws.FSDP(), backend="eager", fullgraph=True)
    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()

    step(torch.randn(4, 8))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(torch.randn(4, 8))
    return collections.Counter(event.name for event in profile.events() if "c10d" in event.name)


def test_a_step_sends_messages_that_gloo_carries_well(pool2: Any) -> None:
    """All shards of a bucket in one, and none whose name is longer than 15 letters (see the note of the module)."""
    for counts in pool2.run(messages_of_a_step):
        assert counts["_c10d_functional::reduce_scatter_tensor"] == 1, counts
        assert counts["_c10d_functional::reduce_scatter_tensor_coalesced"] == 0, counts
        assert counts["c10d::_allgather_base_"] >= 1, counts
        assert not any("allgather" in name and "coalesced" in name for name in counts), counts
        assert not any("all_gather" in name for name in counts), counts


GIVEN: dict[Any, tuple[Any, ...]] = {
    op_info.c10d.reduce_scatter_tensor_coalesced.default: ([torch.empty(4), torch.empty(2)], "sum", 2, "0"),
    op_info.c10d.all_gather_into_tensor.default: (torch.empty(4), 2, "0"),
    op_info.c10d.all_gather_into_tensor_coalesced.default: ([torch.empty(4), torch.empty(2)], 2, "0"),
    ALL_GATHER_INTO: ([torch.empty(4)], [torch.empty(8)], 2, "0"),
}


def test_each_has_its_case() -> None:
    assert GIVEN.keys() == cpu_collectives.REPLACEMENTS.keys()


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("operator", GIVEN, ids=str)
def test_they_stand_in_on_cpus_alone(operator: Any, device: str) -> None:
    stock, stand_in = Mock(return_value="torch"), Mock(return_value="ours")
    given = tree_map(lambda one: one.to(device) if isinstance(one, torch.Tensor) else one, GIVEN[operator])
    assert cpu_collectives._on_cpu(stock, stand_in)(*given) == ("ours" if device == "cpu" else "torch")
    (stand_in if device == "cpu" else stock).assert_called_once_with(*given)
