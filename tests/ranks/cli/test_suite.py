"""The suite on two ranks: a contender that fails is told everywhere and the others go on, and the file has it all."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import wholestep as ws
from tests.harness.rank_pools import Pool
from wholestep.cli.suite import rank_session
from wholestep.cli.suite.contenders import Contender, Kind
from wholestep.cli.suite.contenders import prepare as real_prepare
from wholestep.cli.suite.rank_messages import RankMessages
from wholestep.cli.suite.rank_session import Plan, on_rank
from wholestep.cli.suite.results import SuiteReport, load
from wholestep.cli.suite.workloads import Training
from wholestep.errors import RankMissingError
from wholestep.runtime.distributed import world


def prepare(kind: Kind, training: Training, here: ws.World) -> Contender:
    """Contenders that need no compiler; one fails on rank 1 alone."""
    if kind is Kind.FSDP and here.rank == 1:
        raise MemoryError("too large for me")
    if kind is Kind.FSDP:
        return Contender(kind=kind, call=lambda: torch.zeros(()), step=None)
    contender = real_prepare(Kind.EAGER, training, here)
    return Contender(kind=kind, call=contender.call, step=None)


def run_session(path: str, lane_s: float) -> None:
    """A session of an hour, by a clock on which a contender takes at least so long to be made."""
    clock = Clock()
    report = SuiteReport(training="tiny", nproc=2, device="", torch_version="", date="", command="", loss_tolerance=1.0)
    plan = Plan(
        report=report, earlier=(report,), kinds=(Kind.EAGER, Kind.FSDP, Kind.COMPILED_DDP), num_steps=6,
        deadline=clock.time() + 3600, path=Path(path), caches=Path(path).parent,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_session, "time", clock)
        patch.setattr(rank_session, "prepare", clock.late(lane_s))
        for name in (*rank_session.ENVIRONMENT, "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            patch.setenv(name, "")  # what the session sets is gone after this block
        patch.setattr(rank_session, "BLOCK_STEPS", 2)
        patch.setattr(rank_session, "LOSS_STEPS", 3)
        patch.setattr(rank_session._Session, "_set_up_compiler", lambda self: None)
        on_rank(plan)


class Clock:
    """What a session asks of `time`, with hours of its own."""

    monotonic, perf_counter = time.monotonic, time.perf_counter

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def time(self) -> float:
        return time.time() + self._ahead_s

    def late(self, seconds: float) -> Callable[..., Contender]:
        """`prepare`, after which it is later."""

        def slowly(kind: Kind, training: Training, here: ws.World) -> Contender:
            self._ahead_s += seconds
            return prepare(kind, training, here)

        return slowly


def test_a_contender_that_fails_is_told_and_the_others_go_on(pool2: Pool, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    pool2.run(run_session, str(path), 0.0)
    earlier, found = load(path)
    assert earlier.contenders == {}
    assert list(found.contenders) == ["eager", "fsdp", "compiled_ddp"]
    assert found.contender(Kind.FSDP).outcome == "failed"
    assert found.contender(Kind.FSDP).note == "rank 1: first steps: MemoryError: too large for me"
    for kind in (Kind.EAGER, Kind.COMPILED_DDP):
        one = found.contender(kind)
        assert (one.outcome, one.note) == ("ok", "")
        assert None not in (one.median_ms, one.p10_ms, one.p90_ms, one.loss, one.first_s)
        assert one.p10_ms <= one.median_ms <= one.p90_ms
        assert one.tokens_per_s == pytest.approx(1e3 * 2 * 2 * 64 / one.median_ms)
        assert 5.0 < one.loss < 5.6
        assert one.first_s > 0
        assert (one.peak_bytes, one.exposed_ms, one.breakdown) == (None, None, None)  # there is no GPU


def test_a_contender_for_which_there_is_no_time_is_not_run(pool2: Pool, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    pool2.run(run_session, str(path), 3598.0)
    found = load(path)[-1]
    assert found.contender(Kind.EAGER).outcome == "ok"
    assert found.contender(Kind.EAGER).median_ms is not None
    assert {found.contender(kind).outcome for kind in (Kind.FSDP, Kind.COMPILED_DDP)} == {"not run"}
    assert "no time" in found.contender(Kind.FSDP).note


def talk(absent: bool) -> list[object]:
    here = world.init()
    line = RankMessages(here, deadline=time.time() + 30)
    heard = line.all([here.rank, "x"])
    if absent:
        line._deadline = time.time()  # the next round is waited for as short as one can
    if absent and here.rank == 1:
        return heard
    if absent:
        with pytest.raises(RankMissingError, match="Rank 1 did not come to round 2"):
            line.all(None)
        return heard
    assert line.first(here.rank) == 0
    return heard


def test_ranks_hear_each_other_and_do_not_wait_for_ever(pool2: Pool) -> None:
    assert pool2.run(talk, False) == [[[0, "x"], [1, "x"]]] * 2
    pool2.renew()
    assert pool2.run(talk, True) == [[[0, "x"], [1, "x"]]] * 2
