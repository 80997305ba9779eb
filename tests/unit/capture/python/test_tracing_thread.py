"""Other threads go on while a step is captured: nothing of theirs is refused, swallowed or taken for the step's."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.harness.second_thread import closed_lock, of_a_library, second_thread, wait_for
from tests.harness.training import backward_and_step
from wholestep.capture.capture import capture
from wholestep.capture.python.tracing_thread import is_capturing
from wholestep.errors import CaptureError
from wholestep.ir import node_meta
from wholestep.ir.node_meta import Region


class Waits(nn.Module):
    """Stays in its forward, or in its backward, until it may go on."""

    def __init__(self, where: str, inside: threading.Lock, may_go_on: threading.Lock) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.where, self.inside, self.may_go_on = where, inside, may_go_on

    def stay(self, where: str) -> None:
        if self.where == where:
            self.inside.release()
            wait_for(self.may_go_on)

    def forward(self) -> Tensor:
        self.stay("forward")
        total = self.weight.sum()
        total.register_hook(lambda grad: self.stay("backward"))
        return total


def train_another(where: str, inside: threading.Lock, may_go_on: threading.Lock) -> None:
    """What a thread may do that no step may, or that is recorded of one."""
    model = Waits(where, inside, may_go_on)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    model().backward()
    opt.step()
    assert torch.equal(model.weight, torch.full((2,), 0.9))
    assert [int(one) for one in torch.autograd.grad(model.weight.square().sum(), model.weight)[0] * 10] == [18, 18]
    print("seen elsewhere:", model.weight)
    torch.ones(4).untyped_storage().resize_(0)


class Model(nn.Module):
    """Computes while another thread trains."""

    def __init__(self) -> None:
        super().__init__()
        self.begins, self.inside, self.may_go_on, self.ends = closed_lock(), closed_lock(), closed_lock(), closed_lock()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.begins.release()
        wait_for(self.inside)
        x = x * 2
        self.may_go_on.release()
        wait_for(self.ends)
        return self.second(x)


def train(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
    return backward_and_step(model(x).sum(), opt)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_another_thread_trains_and_prints(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = Model()
    locks = (model.begins, model.inside, model.may_go_on, model.ends)

    def run() -> None:
        wait_for(model.begins)
        try:
            train_another(where, model.inside, model.may_go_on)
        finally:
            model.ends.release()

    with warnings.catch_warnings(), of_a_library(*locks), ThreadPoolExecutor(1) as threads:
        warnings.simplefilter("error")
        done = threads.submit(run)
        captured = capture(train, (model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 3)), {})
        done.result()
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
        assert found == [False], "the capture is of the other thread"
        dist.destroy_process_group(dist.new_group([0]))

    with second_thread(talk) as let:

        def step(model: nn.Module, x: Tensor) -> Tensor:
            let()
            return model(x)

        capture(step, (nn.Linear(3, 3), torch.ones(2, 3)), {})


@pytest.mark.parametrize("how", ["next", "lambda"])
def test_another_thread_takes_the_next_batch(how: str) -> None:
    batches, found = iter([1, 2]), []
    take = {"next": partial(next, batches), "lambda": lambda: next(batches)}[how]
    with second_thread(lambda: found.append(take())) as let:

        def step(model: nn.Module, x: Tensor) -> Tensor:
            let()
            return model(x)

        capture(step, (nn.Linear(3, 3), torch.ones(2, 3)), {})
    assert found == [1]


@pytest.mark.parametrize("starts", [
    lambda: ThreadPoolExecutor(1).submit(int), lambda: threading.Thread(target=int).start(),
], ids=["pool", "thread"])  # fmt: skip
def test_a_step_that_starts_a_thread_is_refused(starts: Callable[[], object]) -> None:
    """Nobody sees what it does, and it would do it while capturing only."""

    def step(x: Tensor) -> Tensor:
        starts()
        return x * 2

    with pytest.raises(CaptureError, match="does more than compute with Python's objects"):
        capture(step, (torch.ones(2),), {})
