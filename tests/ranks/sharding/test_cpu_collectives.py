"""Reduce-scatters of several tensors on CPUs: one message, and the bits of torch's own."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import wholestep as ws
from wholestep.ir import op_info
from wholestep.lower.base import cpu_collectives
from wholestep.lower.base.cpu_collectives import reduce_scatter_together

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


def messages_of_a_step() -> tuple[int, int]:
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
    names = ("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(torch.randn(4, 8))
    one, several = (sum(event.name == f"_c10d_functional::{name}" for event in profile.events()) for name in names)
    return one, several


def test_a_step_sends_one_message(pool2: Any) -> None:
    for one, several in pool2.run(messages_of_a_step):
        assert (one, several) == (1, 0)


def test_elsewhere_torch_starts_them() -> None:
    with patch.object(cpu_collectives, "_TOGETHER", return_value=["started"]) as stock:
        tensors = [torch.empty(4, device="meta"), torch.empty(2, device="meta")]
        assert reduce_scatter_together(tensors, "sum", 2, "group") == ["started"]
    stock.assert_called_once_with(tensors, "sum", 2, "group")
