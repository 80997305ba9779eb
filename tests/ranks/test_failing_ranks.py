"""Ranks that do not fit together: an error with its reason on every rank, within bounded time, and never a hang."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import wholestep as ws
from tests.behaviour.small_models import FEATURES, batch_norm_net, loss_of, mlp, sgd
from tests.behaviour.untouched import assert_untouched, batch, everything
from tests.harness.training import backward_and_step
from wholestep.errors import PeerRefusedError
from wholestep.ir.printer import source
from wholestep.ir.program import Stage
from wholestep.runtime.distributed import heartbeat

HERE = Path(__file__).name

pytestmark = pytest.mark.ranks


def outcome(step: Any, batches: list[tuple[Tensor, ...]], **objects: object) -> tuple[type, str, int, float]:
    """Call the step on every batch until it fails: class and text of the error, completed calls, seconds waited.

    Checks that the call that failed has left every object as it was.
    """
    for call, one in enumerate(batches):
        before, started = everything(**objects), time.monotonic()
        try:
            step(*one)
        except ws.WholestepError as error:
            assert_untouched(before, everything(**objects))
            return type(error), str(error), call, time.monotonic() - started
    raise AssertionError("no call failed")


def ddp_step(module: nn.Module, opt: torch.optim.Optimizer, **strategy: Any) -> Any:
    @ws.compile(strategy=ws.DDP(**strategy), backend="eager", fullgraph=True)
    def step(x: Tensor, y: Tensor) -> Tensor:
        return backward_and_step(loss_of(module, x.to(next(module.parameters()).dtype), y), opt)

    return step


def models_differ(what: str) -> tuple[type, str, int, float]:
    rank = dist.get_rank()
    module: nn.Module = mlp()
    if what == "width" and rank == 1:
        module = nn.Sequential(nn.Linear(FEATURES, 9), nn.Tanh(), nn.Linear(9, 3))
    if what == "depth" and rank == 1:
        module = nn.Sequential(mlp(), nn.Tanh(), nn.Linear(3, 3))
    if what == "dtype" and rank == 1:
        module.double()
    if what == "frozen" and rank == 1:
        module[0].requires_grad_(False)  # type: ignore[index]
    if what == "buffers" and rank == 1:
        module = nn.Sequential(module, nn.BatchNorm1d(3, affine=False))
    opt = sgd(module)
    step = ddp_step(module, opt)
    return outcome(step, [batch()], module=module, opt=opt)


@pytest.mark.parametrize("what", ["width", "depth", "dtype", "frozen", "buffers"])
def test_models_that_differ_are_an_error_on_both_ranks(pool2: Any, what: str) -> None:
    first, second = pool2.run(models_differ, what)
    assert first[0] is second[0] is ws.RankMismatchError
    assert first[1] == second[1], "every rank must show the same difference"
    assert "rank" in first[1].lower()


def code_paths_differ(how: str) -> tuple[type, str, int, float]:
    rank = dist.get_rank()
    module = nn.ModuleDict({"body": mlp(), "left": nn.Linear(3, 3), "right": nn.Linear(3, 3)})
    opt = sgd(module)

    @ws.compile(strategy=ws.DDP(), backend="eager", fullgraph=True)
    def step(x: Tensor, y: Tensor) -> Tensor:
        hidden = module["body"](x)
        if how == "heads":
            hidden = module["left" if rank == 0 else "right"](hidden)
        loss = nn.functional.cross_entropy(hidden, y)
        if how != "heads" and rank == 1:
            return loss if how == "graph" else loss.detach()
        return backward_and_step(loss, opt)

    return outcome(step, [batch()], module=module, opt=opt)


@pytest.mark.parametrize("how", ["heads", "no_backward"])
def test_code_paths_that_differ_are_an_error_on_both_ranks(pool2: Any, how: str) -> None:
    first, second = pool2.run(code_paths_differ, how)
    assert first[0] is second[0] is ws.RankMismatchError
    assert first[1] == second[1]


def test_a_rank_whose_result_has_a_graph_tells_the_other(pool2: Any) -> None:
    first, second = pool2.run(code_paths_differ, "graph")
    assert (first[0], second[0]) == (PeerRefusedError, ws.CaptureError)


@contextmanager
def waiting_at_most(timeout_s: float) -> Iterator[None]:
    """A World in which ranks wait so long for each other, in place of the pool's."""
    backend, usual_s = "gloo", ws.init().timeout_s
    ws.init().close()
    ws.init(backend, timeout_s)
    try:
        yield
    finally:
        ws.init().close()
        ws.init(backend, usual_s)


def paths_part_later() -> tuple[type, str, int, float]:
    """Alike for two calls; then the flag of one rank changes, and with it the set of gradients."""
    with waiting_at_most(5.0):
        module = nn.ModuleDict({"body": mlp(), "head": nn.Linear(3, 3)})
        opt = sgd(module)

        @ws.compile(strategy=ws.DDP(hold_updates=True), backend="eager", fullgraph=True)
        def step(x: Tensor, y: Tensor, with_head: bool) -> Tensor:
            hidden = module["body"](x)
            return backward_and_step(
                nn.functional.cross_entropy(module["head"](hidden) if with_head else hidden, y), opt
            )

        batches: list[Any] = [(*batch(), True), (*batch(), True), (*batch(), dist.get_rank() == 0)]
        return outcome(step, batches, module=module, opt=opt)


def test_code_paths_that_differ_after_two_calls_are_an_error_on_both_ranks(pool2: Any) -> None:
    """One rank has a program to agree on and the other has none: an error on both, in bounded time."""
    first, second = pool2.run(paths_part_later)
    assert first[0] is second[0] is ws.RankMissingError
    assert re.search(r"step( \(\d+\))?, call 3", first[1])
    assert "Rank 0 of 2 did not come to the plan of step" in second[1]
    assert [first[2], second[2]] == [2, 2]
    assert max(first[3], second[3]) < 30


def one_rank_captures_again() -> tuple[list[float], int, str]:
    """The last batch of one rank is smaller: it captures again, to the same schedule, and the other does not."""
    torch.manual_seed(0)
    module = mlp()
    opt = sgd(module)
    step = ddp_step(module, opt)
    x, y = batch()
    rows = 3 if dist.get_rank() == 1 else len(x)
    for count in (len(x), rows, rows, len(x)):
        step(x[:count], y[:count])
    return [p.sum().item() for p in module.parameters()], step.cache_info().traces, step.plan


def test_a_rank_may_capture_again_alone_when_the_plan_stays(pool2: Any) -> None:
    (first, one_trace, plan), (second, two_traces, other_plan) = pool2.run(one_rank_captures_again)
    assert (one_trace, two_traces) == (1, 2)
    assert first == second
    assert plan == other_plan


def texts() -> list[str]:
    """Graph and plan of a step with buffers, several buckets, host scalars and a clip, on other data and weights."""
    torch.manual_seed(dist.get_rank())
    module = batch_norm_net()
    opt = torch.optim.AdamW(module.parameters(), lr=0.1)

    @ws.compile(strategy=ws.DDP(bucket_bytes=200), backend="eager", fullgraph=True)
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(module, x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        return loss

    step(*batch())
    return [step.plan, *(source(step.program(stage)) for stage in Stage)]


def test_every_rank_has_the_same_plan_and_the_same_graph(pool2: Any) -> None:
    first, second = pool2.run(texts)
    assert first == second
    assert first[0].count("all_reduce") > 1
    assert all("wholestep.gradient" in text or "all_reduce" in text for text in first)


def one_rank_cannot_capture() -> tuple[type, str, int, float]:
    """The data of one rank leads into a branch that cannot be captured."""
    module = mlp()
    opt = sgd(module)

    @ws.compile(strategy=ws.DDP(), backend="eager", fullgraph=True)
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(module, x, y)
        if dist.get_rank() == 1 and loss > 3:
            loss = loss / 2
        return backward_and_step(loss, opt)

    return outcome(step, [batch()], module=module, opt=opt)


def test_a_rank_that_cannot_capture_does_not_leave_the_others_waiting(pool2: Any) -> None:
    first, second = pool2.run(one_rank_cannot_capture)
    assert second[0] is ws.CaptureError
    assert HERE in second[1]
    assert first[0] is PeerRefusedError
    assert "1" in first[1]
    assert first[3] < 30, "the others learn it at once, not after the timeout"


def exits_before_the_first_step(how: str) -> None:
    module = batch_norm_net()
    opt = sgd(module)
    step = ddp_step(module, opt)
    if dist.get_rank() == 1:
        if how == "dies":
            os._exit(4)
        ws.init().close()
        return
    heartbeat.SILENT_AFTER_S = 4.0  # here only: this rank's process ends with the test that changes it
    kind, text, call, _ = outcome(step, [batch()], module=module, opt=opt)
    assert kind is ws.RankMissingError
    assert call == 0
    raise ws.RankMissingError(text)


@pytest.mark.parametrize("how", ["leaves", "dies"])
def test_a_rank_that_exits_before_the_first_step_is_named(pool2: Any, how: str) -> None:
    pool2.begin()
    started = time.monotonic()
    with pytest.raises(ws.RankMissingError, match=r"[Rr]ank 1"):
        pool2.run(exits_before_the_first_step, how, grace_s=60)
    assert time.monotonic() - started < 70


@contextmanager
def in_a_group_of_its_own(timeout_s: float, name: str) -> Iterator[dist.Store]:
    """As in a program that makes its process group itself, and no World. After an error the process has to end."""
    usual_s, where = ws.init().timeout_s, int(os.environ["MASTER_PORT"])
    ws.init().close()
    store = dist.PrefixStore(name, dist.TCPStore("127.0.0.1", where, is_master=False))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))
    yield store
    ws.init().close()
    if dist.is_initialized():
        dist.destroy_process_group()
    ws.init("gloo", usual_s)


def never_calls_the_step() -> tuple[type, str, int, float] | None:
    """The last line of rank 1 is where it is when the other gives up."""
    with in_a_group_of_its_own(3.0, "never calls the step") as store:
        module = mlp()
        opt = sgd(module)
        step = ddp_step(module, opt)
        if dist.get_rank() == 0:
            found = outcome(step, [batch()], module=module, opt=opt)
            store.set("over", "")
            return found
        store.wait(["over"], timedelta(seconds=60))
        return None


def test_a_rank_that_never_calls_the_step_is_named_within_the_time_of_the_group(pool2: Any) -> None:
    found, _ = pool2.run(never_calls_the_step)
    kind, text, call, waited_s = found
    line = never_calls_the_step.__code__.co_firstlineno + 10
    assert (kind, call) == (ws.RankMissingError, 0)
    assert re.search(r"Rank 1 of 2 did not come to .+ in 3\.\d s; rank 0 \(" + HERE, text)
    assert f"Rank 1 was last outside of any compiled step ({HERE}:{line})." in text
    assert "now 3 s" in text
    assert waited_s < 8


def ends_without_a_world(how: str) -> None:
    """Raises on rank 0 what it is told in its World of rank 1, which ends without one."""
    module = mlp()
    opt = sgd(module)
    step = ddp_step(module, opt)  # as a decorator that runs before there is a group
    with in_a_group_of_its_own(100.0, f"ends without a World, {how}"):
        if dist.get_rank() == 0:
            heartbeat.SILENT_AFTER_S = 4.0  # here only: this rank's process ends with the test that changes it
            kind, text, *_ = outcome(step, [batch()], module=module, opt=opt)
            assert kind is ws.RankMissingError
            raise ws.RankMissingError(text)
        if how == "ends":
            sys.exit(0)
        if how == "is killed":
            ddp_step(module, opt)
            time.sleep(1.5)  # some signs of life
            os._exit(4)
        dist.destroy_process_group()
        time.sleep(100)  # and another group, or none: this one has no need of rank 1 any more


@pytest.mark.parametrize(
    ("how", "said", "grace_s"),
    [
        ("ends", "ended its program", 60),
        ("is killed", "has given no sign of life", 60),
        ("leaves", "left its process group", 0.1),
    ],
)
def test_a_rank_that_ends_without_a_world_is_noticed(pool2: Any, how: str, said: str, grace_s: float) -> None:
    pool2.begin()
    started = time.monotonic()
    with pytest.raises(ws.RankMissingError) as caught:
        pool2.run(ends_without_a_world, how, grace_s=grace_s)
    assert "Rank 1 of 2 did not come to " in str(caught.value)
    assert f"It will not come any more:\n  rank 1 {said}" in str(caught.value)
    assert time.monotonic() - started < 40


FUSE = {"calls_left": -1}
"""How many more times the operator below may run on this rank before its process ends; negative: for ever."""


@torch.library.custom_op("wholestep_bad_ranks::fuse", mutates_args=())
def fuse(x: Tensor) -> Tensor:
    """A copy of its argument; the process that has used up its calls dies here, in the middle of a step."""
    if FUSE["calls_left"] == 0:
        os._exit(9)
    FUSE["calls_left"] -= 1
    return x.clone()


@fuse.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


fuse.register_autograd(lambda ctx, grad: fuse(grad))


class Fused(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return fuse(x)  # type: ignore[no-any-return]


def dies_in_the_middle_of_a_step(hold_updates: bool) -> None:
    """Several buckets and running statistics: some gradients have arrived when the other rank goes."""
    body = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8))
    module = nn.Sequential(body, Fused(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    opt = sgd(module)
    step = ddp_step(module, opt, bucket_bytes=100, hold_updates=hold_updates)
    # The operator runs in forward and backward. Two steps and the forward of the third: dies in its backward.
    FUSE["calls_left"] = 5 if dist.get_rank() == 1 else -1
    kept = {"module": module, "opt": opt} if hold_updates else {}
    kind, text, call, waited_s = outcome(step, [batch() for _ in range(4)], **kept)
    assert step.plan.count("all_reduce") > 2
    assert kind is ws.RankMissingError
    assert call == 2
    assert waited_s < 50
    raise ws.RankMissingError(text)


@pytest.mark.parametrize("hold_updates", [True, False])
def test_a_rank_that_dies_in_the_middle_of_a_step_is_named(pool2: Any, hold_updates: bool) -> None:
    """With updates held nothing has changed; without, the error says that something may have."""
    pool2.begin()
    started = time.monotonic()
    with pytest.raises(ws.RankMissingError, match="Rank 1 of 2") as caught:
        pool2.run(dies_in_the_middle_of_a_step, hold_updates, grace_s=60)
    assert time.monotonic() - started < 70
    assert "step" in str(caught.value)
    assert ("load a checkpoint" in str(caught.value)) == (not hold_updates)
