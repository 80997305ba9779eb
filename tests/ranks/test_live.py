"""Live steps on two ranks: the numbers of eager DistributedDataParallel, and a named error where ranks part."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws

pytestmark = pytest.mark.ranks

CALLS = 8


class Training:
    """One training of a rank; ranks begin with different weights."""

    def __init__(self, *, wrapped: bool) -> None:
        torch.manual_seed(0 if wrapped else dist.get_rank())
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        self.model: nn.Module = DistributedDataParallel(self.net) if wrapped else self.net
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.opt, 2, 0.5)
        self.log: list[float] = []

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.model(x) - y).square().mean()

    def update(self, loss: Tensor) -> None:
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.opt.step()
        self.schedule.step()
        self.opt.zero_grad()


def appends(t: Training, x: Tensor, y: Tensor) -> None:
    loss = t.loss(x, y)
    t.update(loss)
    t.log.append(loss.item())


def guards(t: Training, x: Tensor, y: Tensor) -> None:
    loss = t.loss(x, y)
    if not math.isfinite(loss.item()):
        return
    t.update(loss)
    t.log.append(loss.item())


def looks_on_one_rank(t: Training, x: Tensor, y: Tensor) -> None:
    loss = t.loss(x, y)
    if dist.get_rank() == 0 and len(t.log) % 3 == 0:
        t.log.append(loss.item())  # between forward and backward, on this rank alone
    t.update(loss)
    t.log.append(loss.item())


def branches_by_rank(t: Training, x: Tensor, y: Tensor) -> None:
    loss = t.loss(x, y)
    t.log.append(loss.item())
    t.update(loss * (2.0 if loss.item() > 1.0 else 1.0))


def is_refused_on_one_rank(t: Training, x: Tensor, y: Tensor) -> None:
    loss = t.loss(x, y)
    t.update(loss / 2 if dist.get_rank() == 1 and loss > 0 else loss)


def prints_on_the_first_rank(t: Training, x: Tensor, y: Tensor) -> None:
    loss = t.loss(x, y)
    if dist.get_rank() == 0:
        print(loss.item())
    t.update(loss)


STEPS: list[Callable[..., None]] = [
    appends, guards, looks_on_one_rank, branches_by_rank, is_refused_on_one_rank, prints_on_the_first_rank,
]  # fmt: skip


def batch(call: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * call + dist.get_rank())
    return torch.randn(3, 4, generator=generator), torch.randn(3, 1, generator=generator)


def beside_ddp(name: str) -> tuple[bool, bool, int, int, int]:
    ws.init()
    step = next(one for one in STEPS if one.__name__ == name)
    eager, live = Training(wrapped=True), Training(wrapped=False)
    compiled = ws.compile(lambda x, y: step(live, x, y), strategy=ws.DDP(), backend="eager")
    for call in range(CALLS):
        step(eager, *batch(call))
        compiled(*batch(call))
    pairs = zip(eager.net.state_dict().values(), live.net.state_dict().values(), strict=True)
    report: Any = compiled.explain().live
    walks: int = compiled._live._peers.walk.walks  # type: ignore[union-attr]
    return all(torch.equal(*pair) for pair in pairs), eager.log == live.log, report.calls, report.launches, walks


@pytest.mark.parametrize("name", [step.__name__ for step in STEPS])
def test_it_trains_as_ddp_does(pool2: Any, name: str) -> None:
    for same_state, same_log, calls, launches, walks in pool2.run(beside_ddp, name):
        assert (same_state, same_log, calls) == (True, True, CALLS)
        assert walks <= 2  # optimizer state comes with the first call
        assert launches >= {"appends": CALLS - 1, "guards": 2 * (CALLS - 1)}.get(name, 0)


def one_rank_skips(call_skipped: int) -> tuple[str, str, bool]:
    ws.init()
    training = Training(wrapped=False)
    calls = iter(range(100))

    def step(x: Tensor, y: Tensor) -> None:
        loss = training.loss(x, y)
        training.log.append(loss.item())
        if next(calls) == call_skipped and dist.get_rank() == 1:
            return
        training.update(loss)

    compiled = ws.compile(step, strategy=ws.DDP(), backend="eager")
    for call in range(CALLS):
        before = [one.clone() for one in training.net.parameters()]
        try:
            compiled(*batch(call))
        except ws.WholestepError as error:
            same = call == 0 or all(map(torch.equal, before, training.net.parameters()))  # made equal in call 0
            return type(error).__name__, str(error), same
    return "", "", True


@pytest.mark.parametrize("call", [0, 1, 5])
def test_a_rank_that_skips_its_batch_is_an_error_on_both(pool2: Any, call: int) -> None:
    for kind, text, same in pool2.run(one_rank_skips, call):
        assert kind == "RankMismatchError"
        assert "rank 1 ends its call" in text
        assert "test_live.py" in text
        assert same
