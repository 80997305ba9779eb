"""The demo and the bench, made small: two real ranks, both contenders, and the numbers that must agree."""

import json
from dataclasses import replace

import pytest
import torch

from wholestep.cli import main
from wholestep.cli.demo import run_demo
from wholestep.cli.workloads.gpt_demo import DemoSettings, demo_batches
from wholestep.cli.workloads.interleaved import ContenderKind

TINY = DemoSettings(steps=4, rows=2, block_steps=2, text_bytes=2**20, held_out_batches=1, sample_bytes=16, quiet=True)


def test_ranks_and_seeds_see_different_text_and_a_rerun_the_same() -> None:
    text = torch.arange(100_000).remainder(251).to(torch.uint8)

    def first(seed: int, rank: int) -> torch.Tensor:
        ((x, _),) = demo_batches(text, replace(TINY, seed=seed), rank=rank, num_batches=1)
        return x

    assert torch.equal(first(0, 0), first(0, 0))
    assert not torch.equal(first(0, 0), first(0, 1))
    assert not torch.equal(first(0, 0), first(1, 0))
    assert not torch.equal(first(0, 1), first(1, 0))


@pytest.mark.ranks
@pytest.mark.slow
def test_both_contenders_end_at_the_same_place() -> None:
    report = run_demo(TINY, nproc=2)
    assert report.traces == 1  # the schedule moves the rate at every step and costs no retrace
    assert report.wholestep.ranks_equal
    assert report.eager_ddp.ranks_equal
    assert report.largest_difference < 1e-5
    assert report.wholestep.train_loss == pytest.approx(report.eager_ddp.train_loss, abs=1e-5)
    assert report.wholestep.held_out_loss == pytest.approx(report.eager_ddp.held_out_loss, abs=1e-5)
    assert report.wholestep.held_out_loss < 5.5  # it has learned: an untrained model is at log(256)
    assert report.sample.startswith("def ")
    plain = json.loads(json.dumps(report.to_json()))
    assert plain["speed_ratio"] == report.speed_ratio > 0
    assert plain["settings"]["steps"] == 4
    assert "all_reduce" in json.dumps(plain["explain"])


@pytest.mark.ranks
@pytest.mark.slow
def test_the_bench_prints_every_contender(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["bench", "--workload", "conv", "--steps", "4", "--nproc", "2", "--json"])
    assert not left.value.code
    (printed,) = json.loads(capsys.readouterr().out)
    assert set(printed["contenders"]) == {ContenderKind.WHOLESTEP.value, ContenderKind.EAGER_DDP.value}
    for contender in printed["contenders"].values():
        assert 0 < contender["p10_ms"] <= contender["median_ms"] <= contender["p90_ms"]
        assert 0 < contender["eager_ddp_over_contender"]["p10"] <= contender["eager_ddp_over_contender"]["median"]
    assert set(printed["contenders"]["eager DDP"]["eager_ddp_over_contender"].values()) == {1.0}
    measured_ms = printed["contenders"]["wholestep"]["median_ms"]
    assert printed["predicted_over_measured"] == printed["predicted_ms"] / measured_ms > 0
