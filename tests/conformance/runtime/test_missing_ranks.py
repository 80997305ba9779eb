"""A World says who is missing, for how long, and where each rank is."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.harness import fork_server
from tests.harness.training import backward_and_step
from wholestep.errors import RankMissingError
from wholestep.runtime.distributed.world import close_current, init, run

row = pytest.mark.row
HERE = Path(__file__).name


def waits_at_the_end(world: ws.World) -> None:
    world.barrier("end of epoch", timeout_s=2.0)


def waits_elsewhere(world: ws.World) -> None:
    world.barrier("end of epoch", timeout_s=2.0)


def line_in(function: Any) -> str:
    return f"{HERE}:{function.__code__.co_firstlineno + 1}"


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


def changes_alone(rank_that_changes: int, folder: Path) -> None:
    """After two equal calls one rank passes a flag that the other does not: it alone needs a new plan.

    Each rank leaves its error and the seconds to it in a file, and ends as a program does.
    """
    world = init()
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    opt = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)

    def step(x: Tensor, *, both: bool) -> Tensor:
        return backward_and_step(first(second(x) if both else x).square().mean(), opt)

    compiled = ws.compile(step, fullgraph=True)
    for _ in range(2):
        compiled(torch.ones(2, 4), both=True)
    world.barrier("both have run")
    started = time.monotonic()
    with pytest.raises(RankMissingError) as caught:
        compiled(torch.ones(2, 4), both=world.rank != rank_that_changes)
    (folder / f"{world.rank}").write_text(f"{time.monotonic() - started} {caught.value}")
    sys.exit(8)


@row("S8", "heartbeat_ends_a_rendezvous", ranks=2)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_plans_alone_is_not_left_waiting(rank: int, tmp_path: Path) -> None:
    with fork_server.instead_of_spawning(), pytest.raises(RankMissingError, match="ended with exit status 8"):
        run(changes_alone, 2, rank, tmp_path, backend="gloo", timeout_s=100.0, grace_s=40.0)
    found = [(tmp_path / str(number)).read_text().partition(" ") for number in range(2)]
    alone, other = found[rank][2], found[1 - rank][2]
    assert f"Rank {1 - rank} of 2 did not come to the plan of step" in alone
    assert f"Rank {1 - rank} needed no new plan for this call and waits in it" in alone
    assert f"Rank {1 - rank} was last in step, call 3 ({HERE}:" in alone
    assert f"Rank {rank} of 2 ended while rank {1 - rank} needed it in step, call 3" in other
    assert max(float(waited_s) for waited_s, _, _ in found) < 30
