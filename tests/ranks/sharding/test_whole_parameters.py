"""Parameters that FSDP leaves whole, in eager steps between compiled ones: no rank trains them by itself."""

from __future__ import annotations

import copy
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws

pytestmark = pytest.mark.ranks

CALLS = 3


class Net(nn.Module):
    """A single number, a weight that lies in another order than its dims, and a single number that trains later."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.last = nn.Linear(4 * 16, 4)
        self.scale, self.shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(0.5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.tanh(self.conv(x) * self.scale + self.shift).flatten(1))
        return y


def batches(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    return [(torch.randn(4, 3, 6, 6, generator=draw), torch.randint(4, (4,), generator=draw)) for _ in range(count)]


def backward(model: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return loss.detach()


def train(model: Any, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = backward(model, x, y)
    opt.step()
    opt.zero_grad()
    return loss


def micro_batches(model: Any, opt: torch.optim.Optimizer, pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Two micro-batches in eager code, of which the first stays local."""
    (x, y), (x2, y2) = pairs
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            backward(model, x, y)
    else:
        model.set_requires_gradient_sync(False)
        backward(model, x, y)
        model.set_requires_gradient_sync(True)
    train(model, opt, x2, y2)


def both(reduce: Literal["mean", "sum"]) -> None:
    """Calls of a compiled step, and eager steps between them, beside eager DistributedDataParallel."""
    torch.manual_seed(0)
    ours = Net()
    wrapped = DistributedDataParallel(copy.deepcopy(ours), find_unused_parameters=True)
    rates = 0.05, 0.05 * (dist.get_world_size() if reduce == "sum" else 1)  # the gradient of a sum is as much larger
    opt, other = (torch.optim.SGD(m.parameters(), lr=lr) for m, lr in zip((ours, wrapped), rates, strict=True))
    step = ws.compile(train, strategy=ws.FSDP(reduce=reduce), backend="eager", fullgraph=True)
    for x, y in batches(CALLS, 1):
        torch.testing.assert_close(step(ours, opt, x, y), train(wrapped, other, x, y))
        for pair in batches(2, 2):
            torch.testing.assert_close(train(ours, opt, *pair), train(wrapped, other, *pair))
        micro_batches(ours, opt, batches(2, 3))
        micro_batches(wrapped, other, batches(2, 3))
    for one, reference in ((ours.scale, wrapped.module.scale), (ours.conv.weight, wrapped.module.conv.weight)):
        torch.testing.assert_close(one, reference)
        everywhere = [torch.empty_like(one) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, one.detach().contiguous())
        assert all(torch.equal(part, one) for part in everywhere)
    assert step.cache_info().traces == 1


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_eager_steps_between_reduce_them(pool2: Any, reduce: str) -> None:
    pool2.run(both, reduce)


def trains_later() -> list[float]:
    torch.manual_seed(0)
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    ws.compile(train, strategy=ws.FSDP(ignore=("scale",)), backend="eager")(model, opt, *batches(1, 1)[0])
    model.shift.requires_grad_()
    backward(model, *batches(1, 4)[0])
    assert model.shift.grad is not None
    assert model.scale.grad is not None
    return [model.shift.grad.item(), model.scale.grad.item()]


def test_one_that_trains_later_is_reduced_and_an_ignored_one_is_not(pool2: Any) -> None:
    first, second = pool2.run(trains_later)
    assert first[0] == second[0]
    assert first[1] != second[1]


def dtype_changed() -> float:
    torch.manual_seed(0)
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    step = ws.compile(train, strategy=ws.FSDP(), backend="eager")
    (x, y), (x2, y2) = batches(2, 1)
    step(model, opt, x, y)
    model.scale.data = model.scale.data.double()
    model.shift.data = model.shift.data.double()
    step(model, opt, x, y)
    backward(model, x2, y2)
    assert model.scale.grad is not None
    return model.scale.grad.item()


def test_another_dtype_is_noticed_at_the_next_call(pool2: Any) -> None:
    first, second = pool2.run(dtype_changed)
    assert first == second


READ: list[float] = []


def reading(model: Any, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = backward(model, x, y)
    READ.append(loss.item())
    opt.step()
    opt.zero_grad()
    return loss


def live(reduce: Literal["mean", "sum"]) -> None:
    torch.manual_seed(0)
    ours = Net()
    wrapped = DistributedDataParallel(copy.deepcopy(ours))
    rates = 0.05, 0.05 * (dist.get_world_size() if reduce == "sum" else 1)
    opt, other = (torch.optim.SGD(m.parameters(), lr=lr) for m, lr in zip((ours, wrapped), rates, strict=True))
    step = ws.compile(reading, strategy=ws.FSDP(reduce=reduce), backend="eager")
    for x, y in batches(CALLS, 1):
        torch.testing.assert_close(step(ours, opt, x, y), reading(wrapped, other, x, y))
    torch.testing.assert_close(ours.scale, wrapped.module.scale)


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_a_live_step_reduces_them_once(pool2: Any, reduce: str, may_go_live: bool) -> None:
    pool2.run(live, reduce)
