"""How long `wholestep bench` measures: a time, or a number of steps."""

import json
import math
from dataclasses import replace

import pytest

from wholestep.cli import bench, main
from wholestep.cli.bench import BLOCK_STEPS, FIRST_BLOCKS, BenchReport, BenchSettings, ContenderFigures
from wholestep.cli.workloads.interleaved import ContenderKind, Ratio, Timing
from wholestep.errors import ConfigError


def report(settings: BenchSettings, *, nproc: int) -> BenchReport:
    figures = ContenderFigures(
        timing=Timing(first_ms=9.0, median_ms=2.0, p10_ms=1.0, p90_ms=3.0), ratio=Ratio(median=1.0, p10=1.0, p90=1.0)
    )
    return BenchReport(
        settings=settings, steps=settings.steps or 70, nproc=nproc, device="cpu", torch_version="2", machine="m",
        predicted_ms=1.5, cost_source="a test", contenders=dict.fromkeys(settings.contenders, figures),
    )  # fmt: skip


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_a_time_is_positive(seconds: float) -> None:
    with pytest.raises(ConfigError, match="--seconds"):
        replace(BenchSettings(), seconds=seconds)


@pytest.mark.parametrize(("args", "steps"), [([], 70), (["--steps", "30"], 30)])
def test_the_report_tells_the_steps_that_were_run(
    args: list[str], steps: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "run_bench", report)
    with pytest.raises(SystemExit):
        main(["bench", "--nproc", "2", "--workload", "mlp", "--json", *args])
    (printed,) = json.loads(capsys.readouterr().out)
    assert printed["steps"] == steps
    assert printed["predicted_over_measured"] == 0.75
    assert printed["contenders"].keys() == {ContenderKind.WHOLESTEP.value, ContenderKind.EAGER_DDP.value}


def test_first_blocks_are_whole() -> None:
    assert FIRST_BLOCKS * BLOCK_STEPS <= bench.MOST_STEPS
    assert FIRST_BLOCKS % 2 == 0  # so that the turns go on as they were
