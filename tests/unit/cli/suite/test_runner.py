"""The suite from outside: its options, ranks that end early, JAX, and the exit status. No rank is started."""

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from wholestep.cli import bench, main
from wholestep.cli.suite import runner
from wholestep.cli.suite.contenders import DEFAULT, Kind
from wholestep.cli.suite.rank_session import Plan
from wholestep.cli.suite.results import ContenderResult, SuiteReport, load, save
from wholestep.cli.suite.runner import SuiteSettings, run_suite
from wholestep.errors import RankMissingError

CONTENDER = ContenderResult(median_ms=10.0, loss=8.0)


def leave(*args: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["bench", *args])
    return int(left.value.code or 0)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--suite", "cpu", "--workload", "W9"], "W9"),
        (["--suite", "cpu", "--contenders", "ours,nobody"], "got nobody"),
        (["--suite", "cpu", "--steps", "5"], "at least 20"),
        (["--suite", "cpu", "--budget-s", "0"], "--budget-s"),
        (["--suite", "cpu", "--out", "nowhere/x.json"], "nowhere"),
        (["--suite", "cpu", "--nproc", "2", "--contenders", "hsdp_ours,eager"], "hsdp_ours: two replicas"),
        (["--suite", "cpu", "--nproc", "5", "--contenders", "hsdp"], "got --nproc 5"),
        (["--contenders", "ours"], "go with --suite"),
        (["--workload", "W1"], "got W1"),
    ],
    ids=" ".join,
)
def test_a_mistake_is_said_before_anything_runs(
    args: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner.ws, "run", None)
    assert leave("--nproc", "2", *args) == 2
    assert said in capsys.readouterr().err


def test_gpus_that_are_not_there_are_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(runner.torch.cuda, "is_available", lambda: False)
    assert leave("--nproc", "2", "--suite", "gpu") == 2
    assert "--suite cpu" in capsys.readouterr().err


@pytest.mark.parametrize(("outcome", "status"), [("ok", 0), ("not run", 0), ("differs", 1), ("failed", 1)])
def test_the_exit_status_is_that_of_losses_and_errors(
    outcome: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[SuiteSettings] = []

    def report(settings: SuiteSettings, *, nproc: int) -> list[SuiteReport]:
        asked.append(settings)
        contenders = {"eager": CONTENDER, "ours": replace(CONTENDER, outcome=outcome)}
        return [
            SuiteReport(
                training="W1", nproc=nproc, device="d", torch_version="2", date="", command="c", contenders=contenders
            )
        ]

    monkeypatch.setattr(bench, "run_suite", report)
    assert leave("--suite", "cpu", "--workload", "tiny,mlp", "--contenders", "limit,ours", "--nproc", "2") == status
    assert "wholestep" in capsys.readouterr().out
    assert leave("--suite", "cpu", "--json", "--nproc", "2") == status
    (printed,) = json.loads(capsys.readouterr().out)
    assert printed["contenders"]["ours"]["outcome"] == outcome
    first, second = asked
    assert (first.trainings, first.kinds) == (("tiny", "mlp"), (Kind.OURS, Kind.LIMIT))
    assert (second.trainings, second.kinds) == (("mlp", "gpt", "conv", "tiny"), DEFAULT)


def ranks(error: Exception | None) -> Callable[..., None]:
    """In the place of the ranks: two contenders are done, then an end or an error."""

    def started(fn: Any, nproc: int, plan: Plan, *, timeout_s: float) -> None:
        assert 0 < timeout_s < 200
        assert plan.caches.is_dir()
        contenders = {"eager": CONTENDER, "ours": replace(CONTENDER, loss=8.01)}
        save(plan.path, [*plan.earlier, replace(plan.report, device="d", contenders=contenders)])
        if error is not None:
            raise error

    return started


def test_what_was_done_is_kept_where_the_ranks_end_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.ws, "run", ranks(RankMissingError("rank 1 of 2 was ended by signal SIGKILL")))
    path = tmp_path / "out.json"
    kinds = (Kind.EAGER, Kind.OURS, Kind.FSDP)
    settings = SuiteSettings(suite="cpu", trainings=("tiny", "mlp"), kinds=kinds, budget_s=60.0, path=path)
    reports = run_suite(settings, nproc=2)
    assert load(path) == reports
    for report, name in zip(reports, ("tiny", "mlp"), strict=True):
        assert report.training == name
        assert report.contender(Kind.EAGER) == replace(CONTENDER, loss_difference=0.0)
        assert report.contender(Kind.FSDP).outcome == "failed"
        assert "SIGKILL" in report.contender(Kind.FSDP).note
        assert not report.is_sound
    assert reports[0].contender(Kind.OURS).outcome == "ok"  # 0.01 of 8 is less than bfloat16 rounds
    assert reports[1].contender(Kind.OURS).outcome == "differs"  # float32


def jax_contender(
    monkeypatch: pytest.MonkeyPatch, name: str, kind: Kind = Kind.JAX, **done: Any
) -> tuple[ContenderResult, list[Any]]:
    """A contender of JAX whose process ends so, and what was started."""
    started: list[Any] = []

    def process(asked: list[str], **options: Any) -> Any:
        started.append((asked, options))
        if "error" in done:
            raise done["error"]
        return subprocess.CompletedProcess(asked, done["status"], done.get("out", ""), done.get("err", ""))

    monkeypatch.setattr(runner, "_has_jax", lambda: True)
    monkeypatch.setattr(runner.subprocess, "run", process)
    settings = SuiteSettings(suite="cpu", trainings=(name,), kinds=(kind,), budget_s=60.0)
    (report,) = run_suite(settings, nproc=2)
    return report.contender(kind), started


@pytest.mark.parametrize("kind", [Kind.JAX, Kind.JAX_FSDP])
def test_jax_runs_in_a_process_of_its_own(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    out = 'a warning\n{"median_ms": 3.0, "loss": 1.5, "note": "jax 1"}\n'
    contender, ((asked, options),) = jax_contender(monkeypatch, "tiny", kind, status=0, out=out)
    assert contender == ContenderResult(median_ms=3.0, loss=1.5, note="jax 1")
    assert asked[1:] == ["-m", "wholestep.cli.suite.jax_baseline", kind.name.lower(), "tiny", "2", "60"]
    assert options["env"]["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert 0 < options["timeout"] <= 60


def test_why_there_is_no_jax_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    contender, _ = jax_contender(monkeypatch, "tiny", status=1, err="Traceback\nRuntimeError: no cuDNN")
    assert (contender.outcome, contender.note) == ("failed", "RuntimeError: no cuDNN")
    contender, _ = jax_contender(monkeypatch, "tiny", error=subprocess.TimeoutExpired("jax", 9.0))
    assert contender.outcome == "not run"
    contender, started = jax_contender(monkeypatch, "mlp", status=0)
    assert (contender.outcome, started) == ("not run", [])
    monkeypatch.undo()
    monkeypatch.setattr(runner.importlib.util, "find_spec", lambda name: None)
    settings = SuiteSettings(suite="cpu", trainings=("tiny",), kinds=(Kind.JAX,), budget_s=60.0)
    assert run_suite(settings, nproc=2)[0].contender(Kind.JAX).note == "not installed"
