"""A process group written in Python carries a compiled step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from tests.harness.store_group import BACKEND, StoreGroup, register
from tests.harness.training import backward_and_step
from wholestep.runtime.distributed.world import close_current, init

row = pytest.mark.row


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.second(torch.tanh(self.first(x)))


def train(model: nn.Module, compiled: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Losses and final parameters; every rank has its own data."""
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)

    def step(x: Tensor) -> Tensor:
        return backward_and_step(model(x).square().mean(), opt)

    run_step = ws.compile(step, strategy=ws.DDP(), fullgraph=True) if compiled else step
    draw = torch.Generator().manual_seed(dist.get_rank())
    losses = [run_step(torch.randn(5, 6, generator=draw)).detach() for _ in range(4)]
    return losses, [parameter.detach() for parameter in model.parameters()]


def trains_on_a_python_group() -> dict[str, int]:
    register()
    close_current()
    world = init(BACKEND)
    group = dist.group.WORLD
    assert isinstance(group, StoreGroup)
    assert dist.get_backend() == BACKEND
    torch.manual_seed(0)
    plain = Net()
    wanted = train(DistributedDataParallel(copy.deepcopy(plain), gradient_as_bucket_view=True), compiled=False)
    group.calls.clear()
    found = train(plain, compiled=True)
    for one, other in zip(wanted, found, strict=True):
        assert all(map(torch.equal, one, other))
    calls = dict(group.calls)
    world.barrier("trained")
    world.close()
    init("gloo")
    return calls


@row("S10", "python_backend_carries_a_compiled_step")
def test_a_compiled_step_on_a_python_group_equals_eager_ddp(pool2: Any) -> None:
    for calls in pool2.run(trains_on_a_python_group):
        assert calls["allreduce"] >= 4  # one bucket in each of four steps, all of them through Python
        assert set(calls) <= {"allreduce", "broadcast", "barrier"}


def collectives_in_a_step_on_a_python_group() -> None:
    """The other functional collectives, which a step of the user's may contain."""
    register()
    close_current()
    world = init(BACKEND)

    def step(x: Tensor) -> list[Tensor]:
        whole = torch.empty(2 * x.shape[0], x.shape[1])
        dist.all_gather_into_tensor(whole, x * 2)
        part = torch.empty_like(x)
        dist.reduce_scatter_tensor(part, whole + 1)
        turned = torch.empty_like(x)
        dist.all_to_all_single(turned, part * 3)
        sent = turned + 1
        dist.broadcast(sent, src=1)
        return [whole, part, turned, sent]

    x = torch.arange(8.0).view(4, 2) + 100 * world.rank
    wanted, found = step(x), ws.compile(step, fullgraph=True)(x)
    assert all(map(torch.equal, wanted, found))
    world.close()
    init("gloo")


@row("S10", "python_backend_carries_a_compiled_step")
def test_collectives_of_a_step_on_a_python_group_equal_eager_code(pool2: Any) -> None:
    pool2.run(collectives_in_a_step_on_a_python_group)
