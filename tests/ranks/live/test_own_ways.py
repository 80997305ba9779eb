"""Live steps in which one rank does something of its own: the numbers of eager code, and pieces all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import wholestep as ws
from tests.ranks.live import test_live

pytestmark = pytest.mark.ranks

CALLS, LAST = 15, 4
"""Calls of a training, and how many of the last ones are to be pieces alone."""


class Training(test_live.Training):
    """One training of a rank, and what it keeps besides."""

    def __init__(self, *, wrapped: bool) -> None:
        super().__init__(wrapped=wrapped)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
        self.kept: list[Tensor] = []
        self.average = [torch.zeros_like(param) for param in self.net.parameters()]
        self.meter = torch.zeros(())
        self.call = 0

    @property
    def weight(self) -> float:
        """0 on one rank in one call: what `RankMismatchError` advises for a batch that is to be skipped."""
        return 0.0 if dist.get_rank() == 1 and self.call == 5 else 1.0


def is_first() -> bool:
    return dist.get_rank() == 0


def weighs_once(t: Training, x: Tensor, y: Tensor) -> None:
    loss = t.loss(x, y)
    t.log.append(loss.item())
    t.update(loss * t.weight)


def counts_once(t: Training, x: Tensor, y: Tensor) -> None:
    loss = t.loss(x, y)
    t.log.append(loss.item())
    t.update(loss * int(2 - t.weight))


def weighs_and_reads_the_norm(t: Training, x: Tensor, y: Tensor) -> None:
    (t.loss(x, y) * t.weight).backward()
    t.log.append(float(nn.utils.clip_grad_norm_(t.net.parameters(), 1.0)))
    t.opt.step()
    t.opt.zero_grad()


def weighs_and_scales(t: Training, x: Tensor, y: Tensor) -> None:
    loss = t.loss(x, y)
    t.scaler.scale(loss * t.weight).backward()
    t.scaler.unscale_(t.opt)
    nn.utils.clip_grad_norm_(t.net.parameters(), 1.0)
    t.scaler.step(t.opt)
    t.scaler.update()
    t.opt.zero_grad()
    t.log.append(loss.item())


def keeps_a_loss(t: Training, x: Tensor, y: Tensor) -> None:
    loss = t.loss(x, y)
    if is_first():
        t.kept.append(loss.detach())
    t.update(loss)


def logs_after_the_update(t: Training, x: Tensor, y: Tensor) -> None:
    loss = t.loss(x, y)
    t.update(loss)
    if is_first():
        t.log.append(loss.item())


def logs_before_the_backward(t: Training, x: Tensor, y: Tensor) -> None:
    loss = t.loss(x, y)
    if is_first():
        t.log.append(loss.item())
    t.update(loss)


def computes_before_the_backward(t: Training, x: Tensor, y: Tensor) -> None:
    loss = t.loss(x, y)
    if is_first() and t.call % 3 == 0:
        t.log.append(loss.detach().mul(2).sum().item())
    t.update(loss)


def logs_the_norm(t: Training, x: Tensor, y: Tensor) -> None:
    t.loss(x, y).backward()
    norm = nn.utils.clip_grad_norm_(t.net.parameters(), 1.0)
    if is_first():
        t.log.append(norm.item())
    t.opt.step()
    t.opt.zero_grad()


def sums_gradients(t: Training, x: Tensor, y: Tensor) -> None:
    t.loss(x, y).backward()
    if is_first():
        t.kept.append(sum(param.grad.square().sum() for param in t.net.parameters()))
    t.opt.step()
    t.opt.zero_grad()


def averages(t: Training, x: Tensor, y: Tensor) -> None:
    t.update(t.loss(x, y))
    if is_first():
        with torch.no_grad():
            for mean, param in zip(t.average, t.net.parameters(), strict=True):
                mean.lerp_(param, 0.1)


def averages_after_a_read(t: Training, x: Tensor, y: Tensor) -> None:
    loss = t.loss(x, y)
    t.update(loss)
    t.log.append(loss.item())
    if is_first():
        with torch.no_grad():
            for mean, param in zip(t.average, t.net.parameters(), strict=True):
                mean.lerp_(param, 0.1)


def meters(t: Training, x: Tensor, y: Tensor) -> None:
    loss = t.loss(x, y)
    if is_first():
        t.meter.mul_(0.9).add_(loss.detach())
    t.update(loss)
    t.log.append(loss.item())


def draws(t: Training, x: Tensor, y: Tensor) -> None:
    loss = t.loss(x, y)
    if is_first():
        loss = loss + 0.1 * torch.rand_like(loss)
    t.update(loss)
    t.log.append(loss.item())


def branches_once(t: Training, x: Tensor, y: Tensor) -> None:
    loss = t.loss(x, y)
    t.log.append(loss.item())
    if is_first() and t.call == 5:  # a backward that has run ahead is dropped on both ranks
        loss = loss.clamp(max=0.5)
    t.update(loss)


def penalises_by_turns(t: Training, x: Tensor, y: Tensor) -> None:
    loss = t.loss(x, y)
    if is_first() and t.call % 2:
        loss = loss + 0.01 * t.net[0].weight.square().sum()
    t.update(loss)
    t.log.append(loss.item())


STEPS = (
    weighs_once, counts_once, weighs_and_reads_the_norm, weighs_and_scales, keeps_a_loss, logs_after_the_update,
    logs_before_the_backward, computes_before_the_backward, logs_the_norm, sums_gradients, averages,
    averages_after_a_read, meters, draws, branches_once, penalises_by_turns,
)  # fmt: skip
EXECUTED = {"averages_after_a_read": 6}
"""Calls of torch that one rank makes alone, which are one by one: the other one has nothing to run beside them."""


def trained(step: Callable[[Training, Tensor, Tensor], None], wrapped: bool, compiled: bool) -> tuple[list[Any], Any]:
    t = Training(wrapped=wrapped)

    def run(x: Tensor, y: Tensor) -> None:
        step(t, x, y)
        t.log.append(t.call)  # what makes it live

    call: Any = ws.compile(run, strategy=None if wrapped else ws.DDP(), backend="eager") if compiled else run
    told = []
    for t.call in range(CALLS):
        torch.manual_seed(100 * t.call + dist.get_rank())
        call(torch.randn(6, 4), torch.randn(6, 1))
        told += [(call.explain().live, call._live._num_compiled)] if compiled else []
    left = [*t.net.state_dict().values(), *t.kept, *t.average, t.meter]
    return [*map(torch.as_tensor, t.log), *(one.detach().clone() for one in left)], told


def beside_eager_code(name: str, wrapped: bool) -> tuple[bool, int, int, int]:
    """Whether numbers are those of eager DistributedDataParallel; launches and calls one by one in the last calls, and
    how many pieces were compiled in those."""
    ws.init()
    step = next(one for one in STEPS if one.__name__ == name)
    wanted, _ = trained(step, True, False)
    found, told = trained(step, wrapped, True)
    same = len(wanted) == len(found) and all(map(torch.equal, wanted, found))
    (before, first), (after, last) = told[-1 - LAST], told[-1]
    return same, after.launches - before.launches, after.executed - before.executed, last - first


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("name", [step.__name__ for step in STEPS])
def test_what_one_rank_does_keeps_no_other_from_running_pieces(pool2: Any, name: str, wrapped: bool) -> None:
    for same, launches, executed, compiled in pool2.run(beside_eager_code, name, wrapped):
        assert same
        assert compiled == 0
        assert launches >= LAST
        assert executed <= LAST * EXECUTED.get(name, 0)


class Experts(nn.Module):
    """A module of which each rank trains another part: the pieces of two ranks look alike."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[dist.get_rank()](x)  # type: ignore[no-any-return]


def other_experts() -> tuple[bool, int, str]:
    """Whether each expert has the gradient of the rank that trains it, halved; launches; why there are none."""
    ws.init()
    found: list[list[Tensor]] = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, log = Experts(), list[float]()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(
            x: Tensor, model: Experts = model, opt: Any = opt, log: list[float] = log, mean: bool = not compiled
        ) -> None:
            loss = model(x).square().mean()
            loss.backward()
            for param in model.parameters() if mean else ():
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                dist.all_reduce(param.grad.div_(2))
            opt.step()
            opt.zero_grad()
            log.append(loss.item())

        run: Any = ws.compile(step, strategy=ws.DDP(), backend="eager") if compiled else step
        for call in range(6):
            run(torch.full((2, 4), 1.0 + call + dist.get_rank()))
        found.append([torch.tensor(log), *(param.detach() for param in model.parameters())])
    live: Any = run.explain().live
    return all(map(torch.equal, *found)), live.launches, live.piece_lines[0].refused


def test_pieces_whose_collectives_differ_run_one_by_one(pool2: Any) -> None:
    for same, launches, why in pool2.run(other_experts):
        assert same
        assert launches == 0
        assert "experts.0.weight" in why
        assert "experts.1.weight" in why
