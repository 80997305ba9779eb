"""benchmarks/models.py: the models train alike in every lane, and names that are none are told."""

from __future__ import annotations

import json

import pytest

from benchmarks import models
from benchmarks.zoo import CASES

TORCHVISION = {"resnet50", "efficientnet", "convnext", "swin", "deit"}
CHECKED = ("gpt_scaler", "table")


def test_models_train_alike(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["models.py", "--tiny", "--nproc", "1", "--json", *CHECKED])
    assert models.main() == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["model"] for row in told["rows"]] == list(CHECKED)
    for row in told["rows"]:
        eager, _, ours = row["loss"]
        assert ours == pytest.approx(eager, rel=2**-8), row
        assert row["over_eager"] > 0


def test_names_that_are_none_are_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["models.py", "bart"])
    with pytest.raises(SystemExit):
        models.main()
    assert "no model is called bart; there are gpt2" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["models.py", "--list"])
    assert models.main() == 0
    assert capsys.readouterr().out.split() == list(CASES)
    assert set(CASES) > TORCHVISION
