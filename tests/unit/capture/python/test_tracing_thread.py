"""Other threads go on while a step is captured: nothing of theirs is refused, swallowed or taken for the step's."""

from __future__ import annotations

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.harness.training import backward_and_step
from wholestep.capture.capture import capture
from wholestep.capture.python.tracing_thread import is_capturing
from wholestep.ir import node_meta
from wholestep.ir.node_meta import Region


class Waits(nn.Module):
    """Stays in its forward, or in its backward, until it may go on."""

    def __init__(self, where: str, inside: threading.Event, may_go_on: threading.Event) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.where, self.inside, self.may_go_on = where, inside, may_go_on

    def stay(self, where: str) -> None:
        if self.where == where:
            self.inside.set()
            assert self.may_go_on.wait(30)

    def forward(self) -> Tensor:
        self.stay("forward")
        total = self.weight.sum()
        total.register_hook(lambda grad: self.stay("backward"))
        return total


def train_another(where: str, *events: threading.Event) -> None:
    """What a thread may do that no step may, or that is recorded of one."""
    model = Waits(where, *events)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    model().backward()
    opt.step()
    assert torch.equal(model.weight, torch.full((2,), 0.9))
    assert [int(one) for one in torch.autograd.grad(model.weight.square().sum(), model.weight)[0] * 10] == [18, 18]
    print("seen elsewhere:", model.weight)
    torch.ones(4).untyped_storage().resize_(0)


class Model(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with ThreadPoolExecutor(1) as threads:
            inside, may_go_on = threading.Event(), threading.Event()
            done = threads.submit(train_another, self.where, inside, may_go_on)
            assert inside.wait(30)
            x = x * 2
            may_go_on.set()
            done.result()
        return self.second(x)


def train(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
    return backward_and_step(model(x).sum(), opt)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_another_thread_trains_and_prints(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = Model(where)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        captured = capture(train, (model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 3)), {})
    assert "seen elsewhere: Parameter" in capsys.readouterr().out
    nodes = {node.name: node_meta.origin(node) for node in captured.program.graph.nodes if node.op == "call_function"}
    assert (nodes["mul"].region, nodes["mul"].module) == (Region.FORWARD, "model")
    assert (nodes["addmm_1"].region, nodes["addmm_1"].module) == (Region.FORWARD, "second")


@pytest.fixture
def group() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_another_thread_sends_objects_and_makes_groups(group: Any) -> None:
    def talk() -> None:
        found = [None]
        dist.all_gather_object(found, is_capturing())
        assert found == [True]
        dist.destroy_process_group(dist.new_group([0]))

    def step(model: nn.Module, x: Tensor) -> Tensor:
        thread = ThreadPoolExecutor(1)
        thread.submit(talk).result()
        return model(x)

    capture(step, (nn.Linear(3, 3), torch.ones(2, 3)), {})


def test_another_thread_takes_the_next_batch() -> None:
    batches = iter([1, 2])

    def step(model: nn.Module, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(next, batches).result() == 1
            assert pool.submit(lambda: next(batches)).result() == 2
        return model(x)

    capture(step, (nn.Linear(3, 3), torch.ones(2, 3)), {})
