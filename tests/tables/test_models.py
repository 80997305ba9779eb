"""benchmarks/models.py: the models train alike in every contender, and names that are none are told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import models
from benchmarks.zoo import CASES

ROOT = Path(__file__).parents[2]
CHECKED = ("gpt_scaler", "table")


def test_models_train_alike(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["models.py", "--tiny", "--nproc", "1", "--json", *CHECKED])
    assert models.main() == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["model"] for row in told["rows"]] == list(CHECKED)
    for row in told["rows"]:
        eager, _, ours = row["loss"]
        assert ours == eager, row  # the same kernels, in the same order
        assert row["over_eager"] > 0


def test_names_that_are_none_are_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["models.py", "bart"])
    with pytest.raises(SystemExit):
        models.main()
    assert "no model is called bart; there are gpt2" in capsys.readouterr().err


def test_the_command_of_the_readme_runs() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.models", "--list"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == list(CASES)
    assert "python -m benchmarks.models" in (ROOT / "README.md").read_text(encoding="utf-8")
