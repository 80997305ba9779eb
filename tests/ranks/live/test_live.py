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


def logs_the_largest(t: Training, x: Tensor, y: Tensor) -> None:
    loss = t.loss(x, y)
    t.update(loss)
    largest = loss.detach().clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=dist.group.WORLD)
    t.log.append(largest.item())


def waits_for_the_rank_that_logs(t: Training, x: Tensor, y: Tensor) -> None:
    loss = t.loss(x, y)
    t.update(loss)
    if dist.get_rank() == 0:
        t.log.append(loss.item())
    dist.barrier()


def sends_a_flag_after_one_rank_has_looked(t: Training, x: Tensor, y: Tensor) -> None:
    loss = t.loss(x, y)
    if dist.get_rank() == 1:
        t.log.append(loss.item())
    flag = torch.tensor([1.0])  # of no recorded call, so it travels at once
    dist.all_reduce(flag)
    t.update(loss * flag)


def sends_objects_after_one_rank_has_looked(t: Training, x: Tensor, y: Tensor) -> None:
    loss = t.loss(x, y)
    t.update(loss)
    if dist.get_rank() == 1:
        t.log.append(loss.item())
    sizes = [0, 0]
    dist.all_gather_object(sizes, len(x))
    t.log.append(sum(sizes))


def sends_a_message_after_a_look(t: Training, x: Tensor, y: Tensor) -> None:
    loss, told = t.loss(x, y), torch.zeros(1)
    t.update(loss)
    if dist.get_rank() == 0:
        dist.send(torch.tensor([loss.item()]), 1)
    else:
        dist.recv(told, 0)
        t.log.append(told.item())


STEPS: list[Callable[..., None]] = [
    appends, guards, looks_on_one_rank, branches_by_rank, is_refused_on_one_rank, prints_on_the_first_rank,
    logs_the_largest, waits_for_the_rank_that_logs, sends_a_flag_after_one_rank_has_looked,
    sends_objects_after_one_rank_has_looked, sends_a_message_after_a_look,
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
        fewest = {"appends": CALLS - 1, "guards": 2 * (CALLS - 1), "logs_the_largest": CALLS - 1}
        assert launches >= fewest.get(name, 0)


def many_ways(own: str) -> tuple[bool, bool, int]:
    """Five ways through a step, by turns; each rank another one with `own`. Batches have other sizes each time."""
    ws.init()
    halves = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Tanh()).requires_grad_(False)
    halves[0].weight.fill_(0.5)
    found, calls = [], 40
    for wrapped in (True, False):
        t = Training(wrapped=wrapped)

        def step(x: Tensor, y: Tensor, way: int, t: Training = t) -> None:
            out = t.model(x)
            for _ in range(way):
                out = halves(out) if own == "of modules" else out.sin()
            loss = (out - y).square().mean()
            t.update(loss)
            t.log.append(loss.item())

        run: Any = step if wrapped else ws.compile(step, strategy=ws.DDP(), backend="eager")
        for call in range(calls):
            rows = torch.randn(2 + (3 * call + dist.get_rank()) % 7, 4, generator=torch.Generator().manual_seed(call))
            run(rows, rows[:, :1], (call + (dist.get_rank() * (1 + call % 3) if own else 0)) % 5)
        found.append([*map(torch.as_tensor, t.log), *t.net.state_dict().values()])
    live: Any = run.explain().live
    return all(map(torch.equal, *found)), live.is_recorded, live.launches


@pytest.mark.parametrize("own", ["", "of torch", "of modules"])
def test_ranks_learn_ways_and_give_up_together(pool2: Any, own: str) -> None:
    """Calls of torch are each rank's own affair. Those of modules may communicate: they give up in the same call."""
    for same, is_recorded, launches in pool2.run(many_ways, own):
        assert same
        assert (is_recorded, launches > 0) == ((own != "of modules"),) * 2


def averaged(grads: list[Tensor | None]) -> list[Tensor | None]:
    """What a backward leaves: the mean over ranks of each gradient that any of them has."""
    has = torch.tensor([float(one is not None) for one in grads])
    dist.all_reduce(has)
    found: list[Tensor | None] = []
    for one, is_there in zip(grads, has.tolist(), strict=True):
        mean = None
        if is_there:
            mean = torch.zeros(LIKE[len(found) % 2]) if one is None else one / 2
            dist.all_reduce(mean)
        found.append(mean)
    return found


LIKE = ((1, 4), (1,))


def experts(as_modules: bool) -> tuple[bool, int]:
    """Ranks take the same way at first, and then each goes through the other's expert. Both ways look alike."""
    ws.init()
    found, launches = [], 0
    for compiled in (False, True):
        torch.manual_seed(0)
        parts = [nn.Linear(4, 1), nn.Linear(4, 1)]
        opts = [torch.optim.SGD(one.parameters(), lr=0.1) for one in parts]
        params = [param for one in parts for param in one.parameters()]
        log: list[float] = []

        def step(x: Tensor, y: Tensor, way: int, compiled: bool = compiled, parts: Any = parts, opts: Any = opts,
                 params: Any = params, log: Any = log) -> None:  # fmt: skip
            log.append(x.sum().item())
            out = parts[way](x) if as_modules else nn.functional.linear(x, parts[way].weight, parts[way].bias)
            (out - y).square().mean().backward()
            if not compiled:
                for param, grad in zip(params, averaged([param.grad for param in params]), strict=True):
                    param.grad = grad
            for opt in (opts[way], opts[1 - way]):
                opt.step()
            for opt in (opts[way], opts[1 - way]):
                opt.zero_grad()

        called: Any = ws.compile(step, strategy=ws.DDP(), backend="eager") if compiled else step
        for call in range(20):
            called(*batch(call), call // 2 % 2 if call < 12 else (call + dist.get_rank()) % 2)
        found.append([param.detach().clone() for param in params])
        launches = called.explain().live.launches if compiled else 0
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    return True, launches


@pytest.mark.parametrize("as_modules", [False, True])
def test_pieces_that_look_alike_run_together_on_the_same_parameters_alone(pool2: Any, as_modules: bool) -> None:
    for holds, launches in pool2.run(experts, as_modules):
        assert holds
        assert launches > 0


def with_ignored(strategy: ws.Strategy) -> list[tuple[Tensor, Tensor]]:
    """Parameters of a pure step and of a live one that has its backward and update in a piece of their own."""
    ws.init()
    found = []
    for reads in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        log: list[float] = []

        def step(x: Tensor, y: Tensor, model: Any = model, opt: Any = opt, reads: bool = reads, log: Any = log) -> None:
            loss = (model(x) - y).square().mean()
            loss.backward()
            if reads:
                log.append(loss.item())
            opt.step()
            opt.zero_grad()

        compiled = ws.compile(step, strategy=strategy, backend="eager")
        for call in range(CALLS):
            compiled(*batch(call))
        if reads:
            assert compiled.explain().live.launches > 0  # type: ignore[union-attr]
        found.append([full(one.detach()) for one in model.parameters()])
    return list(zip(*found, strict=True))


def full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


@pytest.mark.parametrize("strategy", [ws.DDP(ignore=("0.bias", "2.weight")), ws.FSDP(ignore=("2.weight",))], ids=str)
def test_a_piece_leaves_alone_what_the_strategy_ignores(pool2: Any, strategy: ws.Strategy) -> None:
    (first, second) = pool2.run(with_ignored, strategy)
    for pairs in (first, second):
        for pure, live in pairs:
            torch.testing.assert_close(pure, live)
    assert not torch.equal(first[2][0], second[2][0]), "each rank has its own"


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


def one_rank_looks(how: str, wrapped: bool, strategy: Any, is_compiled: bool = True) -> list[Any]:
    """What a training of ten calls leaves in which one rank looks at something of its own in every third call."""
    ws.init()
    training = Training(wrapped=wrapped)
    best, calls, rank = [9.0], iter(range(100)), dist.get_rank()

    def step(x: Tensor, y: Tensor) -> None:
        call = next(calls)
        loss = training.loss(x, y)
        if how == "before the backward" and rank == 0 and call % 3 == 0:
            training.log.append(loss.detach().mul(2).sum().item())
        training.update(loss)
        training.log.append(loss.item())
        if how == "a norm" and rank == 1 and call % 3 == 0:
            training.log.append(next(training.net.parameters()).norm().item())
        if how == "its best batch" and training.log[-1] < best[0]:
            best[0] = training.log[-1]
            training.log.append((x.mean() * best[0]).item())

    run = ws.compile(step, backend="eager", strategy=strategy) if is_compiled else step
    for call in range(10):
        run(*batch(call))
    return [*training.log, *(full(one.detach()) for one in training.net.parameters())]


@pytest.mark.parametrize("how", ["a norm", "its best batch", "before the backward"])
def test_a_rank_may_look_at_something_of_its_own(pool2: Any, how: str) -> None:
    """It is no error where nothing is reduced, as one rank logs and others do not."""
    wanted = pool2.run(one_rank_looks, how, True, None, False)
    for strategy in (None, ws.DDP()):
        found = pool2.run(one_rank_looks, how, strategy is None, strategy)
        for one, other in zip(found, wanted, strict=True):
            assert len(one) == len(other)
            assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("how", ["a norm", "its best batch"])
def test_a_rank_may_look_at_a_shard_by_itself(pool2: Any, how: str) -> None:
    wanted = pool2.run(one_rank_looks, how, True, None, False)
    found = pool2.run(one_rank_looks, how, False, ws.FSDP())
    for one, other in zip(found, wanted, strict=True):  # losses; of a bias before a norm gradients are rounding alone
        logs = [[value for value in values if isinstance(value, float)] for values in (one, other)]
        assert logs[0] == pytest.approx(logs[1], rel=1e-5)


def lazily_made() -> tuple[str, bool]:
    ws.init()
    model = nn.Sequential(nn.Linear(4, 8), nn.LazyLinear(1))
    step = ws.compile(lambda x: model(x).square().mean().backward(), strategy=ws.DDP(), backend="eager")
    try:
        step(batch(0)[0])
    except ws.CaptureError as error:
        return str(error), nn.parameter.is_lazy(model[1].weight)
    return "", False


def test_ranks_do_not_make_parameters_of_lazy_modules_each_for_itself(pool2: Any) -> None:
    """As DistributedDataParallel has it: they would begin with other numbers."""
    for text, is_lazy in pool2.run(lazily_made):
        assert "1.weight has no shape yet" in text
        assert is_lazy
