"""What wholestep adds to the runtime: a World that says who is missing and where each rank is, on any group."""

from __future__ import annotations

import copy
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from tests.harness import fork_server
from tests.harness.store_group import BACKEND, StoreGroup, register
from wholestep.errors import ConfigError, RankMissingError
from wholestep.runtime.distributed.world import close_current, init, run

row = pytest.mark.row


# ---- who is missing, for how long, and where everybody is ---------------------------------------------------------


def waits_at_the_end(world: ws.World) -> None:
    world.barrier("end of epoch", timeout_s=2.0)


def waits_elsewhere(world: ws.World) -> None:
    world.barrier("end of epoch", timeout_s=2.0)


def line_in(function: Any) -> str:
    return f"test_runtime_world.py:{function.__code__.co_firstlineno + 1}"


def sleeps(seconds: float) -> None:
    time.sleep(seconds)


def misses_a_barrier() -> str:
    """Ranks 0 and 1 wait at one line, 2 at another; 3 does something else for a while."""
    world = init()
    world.barrier("begin of epoch")
    if world.rank == 3:
        sleeps(3.5)
        return ""
    waits = waits_elsewhere if world.rank == 2 else waits_at_the_end
    with pytest.raises(RankMissingError) as caught:
        waits(world)
    return str(caught.value)


@row("S8", "barrier_names_the_missing")
def test_a_barrier_says_who_is_missing_for_how_long_and_where_all_are(ranks4: Any) -> None:
    first, second, third, _ = ranks4.run(misses_a_barrier)
    assert first == second == third
    assert re.search(r'^Rank 3 of 4 did not come to the barrier "end of epoch" in \d+\.\d s; ', first)
    assert f"ranks 0, 1 ({line_in(waits_at_the_end)}), rank 2 ({line_in(waits_elsewhere)}) wait." in first
    assert f"Rank 3 was last outside of any compiled step ({line_in(sleeps)})." in first


def half_of_eight_miss_a_barrier() -> str:
    world = init()
    world.barrier("begin of epoch")
    if world.rank >= 4:
        sleeps(2.5)
        return ""
    with pytest.raises(RankMissingError) as caught:
        waits_at_the_end(world)
    return str(caught.value)


@row("S8", "barrier_names_the_missing")
def test_several_missing_ranks_of_eight_are_named(pool8: Any) -> None:
    message = pool8.run(half_of_eight_miss_a_barrier)[0]
    assert message.startswith('Ranks 4-7 of 8 did not come to the barrier "end of epoch"')
    assert f"ranks 0-3 ({line_in(waits_at_the_end)}) wait." in message


def never_comes() -> str:
    """Rank 1 never joins: the rendezvous says so, before there is any process group."""
    rank = int(os.environ["RANK"])
    close_current()
    if rank == 1:
        sleeps(3.0)
        message = ""
    else:
        with pytest.raises(RankMissingError) as caught:
            init("gloo", timeout_s=1.5)
        message = str(caught.value)
    return message


@row("S8", "barrier_names_the_missing", ranks=2)
def test_the_rendezvous_names_who_never_came() -> None:
    with fork_server.instead_of_spawning():
        message = run(never_comes, 2, backend="gloo")[0]
    assert re.search(r"^Rank 1 of 2 did not come to the rendezvous in \d+\.\d s; rank 0 \(\S+:\d+\) waits\.", message)


# ---- one rank in a collective, the others in a meeting -------------------------------------------------------------


def changes_alone(rank_that_changes: int, folder: Path) -> None:
    """After two equal calls one rank passes a flag that the other does not: it alone needs a new plan.

    Each rank leaves its error and the seconds to it in a file, and ends as a program does.
    """
    world = init()
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    opt = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)

    def step(x: Tensor, *, both: bool) -> Tensor:
        loss = first(second(x) if both else x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    compiled = ws.compile(step)
    for _ in range(2):
        compiled(torch.ones(2, 4), both=True)
    world.barrier("both have run")
    started = time.monotonic()
    with pytest.raises(RankMissingError) as caught:
        compiled(torch.ones(2, 4), both=world.rank != rank_that_changes)
    (folder / f"{world.rank}").write_text(f"{time.monotonic() - started} {caught.value}")
    sys.exit(8)


@row("S8", "pulse_ends_a_meeting", ranks=2)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_plans_alone_is_not_left_waiting(rank: int, tmp_path: Path) -> None:
    with fork_server.instead_of_spawning(), pytest.raises(RankMissingError, match="ended with exit status 8"):
        run(changes_alone, 2, rank, tmp_path, backend="gloo", timeout_s=100.0, grace_s=40.0)
    found = [(tmp_path / str(number)).read_text().partition(" ") for number in range(2)]
    alone, other = found[rank][2], found[1 - rank][2]
    assert f"Rank {1 - rank} of 2 did not come to the plan of step" in alone
    assert f"Rank {1 - rank} needed no new plan for this call and waits in it" in alone
    assert f"Rank {1 - rank} was last in step, call 3 (test_runtime_world.py:" in alone
    assert f"Rank {rank} of 2 ended while rank {1 - rank} needed it in step, call 3" in other
    assert max(float(waited_s) for waited_s, _, _ in found) < 30


# ---- LOCAL_RANK and the device --------------------------------------------------------------------------------------


def own_device() -> tuple[str, str, int]:
    world = init()
    tensor = torch.ones(1, device=world.device)
    return str(world.device), str(tensor.device), int(os.environ["LOCAL_RANK"])


@row("S10", "world_device")
def test_the_world_takes_its_device_from_the_local_rank(ranks2: Any) -> None:
    for device, of_tensor, local_rank in ranks2.run(own_device):
        assert device == of_tensor == (f"cuda:{local_rank}" if ranks2.backend == "nccl" else "cpu")


@row("S10", "world_device")
def test_a_local_rank_without_a_gpu_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host that shows fewer GPUs than it has processes, before any rank waits for another."""
    close_current()
    environment = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    with pytest.raises(ConfigError, match=r"LOCAL_RANK=3 wants a GPU of its own, and this process sees 2"):
        init("nccl")


@row("S10", "world_device")
def test_a_missing_local_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    close_current()
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(ConfigError, match=r"set by half: LOCAL_RANK is missing.* torchrun"):
        init("gloo")


# ---- a process group written in Python carries a compiled step ------------------------------------------------------


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
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    run_step = ws.compile(step, strategy=ws.DDP()) if compiled else step
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
    wanted, found = step(x), ws.compile(step)(x)
    assert all(map(torch.equal, wanted, found))
    world.close()
    init("gloo")


@row("S10", "python_backend_carries_a_compiled_step")
def test_collectives_in_a_compiled_step_on_a_python_group(pool2: Any) -> None:
    pool2.run(collectives_in_a_step_on_a_python_group)
