"""benchmarks/overlap_model.py: the workloads are those that were timed, and a bucketing that is worse is told."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks import overlap_model
from benchmarks.overlap_model import AS_PLACED, COMPILED, GATHERS_LAST, OURS, WORKLOADS, Row
from wholestep.cli.workloads.reference_lm import LanguageModel, LanguageModelSize

TINY = LanguageModelSize(num_layers=1, width=64, num_heads=2, vocabulary=8192, length=32, rows=2)
GATED = replace(TINY, gated=96, vocabulary=128)


@pytest.mark.parametrize(("name", "millions"), [("W1", 163.109376), ("W2", 163.109376), ("W3", 1131.49952)])
def test_workloads_have_the_size_they_should(name: str, millions: float) -> None:
    with torch.device("meta"):
        model = LanguageModel(WORKLOADS[name])
    assert sum(param.numel() for param in model.parameters()) == round(1e6 * millions)


def test_every_variant_is_simulated(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(overlap_model, "WORKLOADS", {"tiny": TINY, "gated": GATED})
    monkeypatch.setattr(sys, "argv", ["overlap_model.py", "--ranks", "4", "--links", "nvlink", "--json"])
    status = overlap_model.main()
    told = json.loads(capsys.readouterr().out)
    assert status == bool(told["faults"])
    rows = told["rows"]
    assert len(rows) == 2 * 5
    for start in range(0, len(rows), 5):
        by_variant = {row["variant"]: row for row in rows[start : start + 5]}
        assert list(by_variant) == [OURS, "25 MB", "one bucket", AS_PLACED, COMPILED]
        # Kernels that are one have one floor.
        compiled = by_variant.pop(COMPILED)
        # Gradients that travel in half precision share no message with others.
        assert compiled["num_collectives"] > by_variant[OURS]["num_collectives"]
        assert compiled["step_us"] < 0.8 * by_variant[OURS]["step_us"]
        assert by_variant["one bucket"]["num_collectives"] == 1
        # The head alone is more than 1 MiB in the larger one, so it is the first bucket of the fixed rule.
        assert by_variant["25 MB"]["num_collectives"] == (2 if by_variant[OURS]["workload"] == "tiny" else 1)
        num_params = 17 if by_variant[OURS]["workload"] == "tiny" else 12
        assert by_variant[AS_PLACED]["num_collectives"] == num_params
        assert by_variant[OURS]["exposed_us"] == min(row["exposed_us"] for row in by_variant.values())
        assert by_variant[AS_PLACED]["exposed_us"] > by_variant[OURS]["exposed_us"]
        assert all(0 <= row["exposed_us"] < row["step_us"] for row in by_variant.values())


def test_gathers_between_reductions_expose_less(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of layers that are large enough to hide them."""
    large = LanguageModelSize(num_layers=2, width=1024, num_heads=8, vocabulary=512, length=512, rows=16)
    monkeypatch.setattr(overlap_model, "WORKLOADS", {"large": large})
    arguments = ["--ranks", "4", "--links", "nvlink", "--strategy", "zero", "--json"]
    monkeypatch.setattr(sys, "argv", ["overlap_model.py", *arguments])
    assert overlap_model.main() == 0
    by_variant = {row["variant"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert list(by_variant) == [OURS, GATHERS_LAST, AS_PLACED, COMPILED]
    assert by_variant[OURS]["exposed_us"] < 0.8 * by_variant[GATHERS_LAST]["exposed_us"]
    assert by_variant[OURS]["num_collectives"] == by_variant[GATHERS_LAST]["num_collectives"]


def row(variant: str, **figures: float) -> Row:
    plain = {"step_us": 1000.0, "exposed_us": 15.0, **figures}
    return Row(workload="W2", ranks=4, link="nvlink", variant=variant, num_collectives=3, peak_bytes=10, **plain)


def test_what_is_worse_is_told() -> None:
    assert overlap_model.faults([row(OURS), row("25 MB")]) == []
    exposes = overlap_model.faults([row(OURS), row("25 MB", exposed_us=5.0)])
    assert exposes == ["W2, 4 ranks, nvlink: ours exposes 15 us, 25 MB 5"]
    # Also where our step is the shorter one: exposing more is what the script is there to tell.
    assert overlap_model.faults([row(OURS), row("25 MB", exposed_us=5.0, step_us=1010.0)]) == exposes
    takes = overlap_model.faults([row(OURS), row("one bucket", step_us=980.0)])
    assert takes == ["W2, 4 ranks, nvlink: ours takes 1000 us, one bucket 980"]
    # What is compiled computes less, and has less to hide its communication with.
    assert overlap_model.faults([row(OURS), row(COMPILED, step_us=500.0, exposed_us=5.0)]) == []
    share = overlap_model.faults([row(OURS, exposed_us=30.0), row("25 MB", exposed_us=40.0)])
    assert share == ["W2, 4 ranks, nvlink: 3.0% of the step are exposed (ours), 2% are allowed"]
    compiled = overlap_model.faults([row(OURS), row(COMPILED, step_us=500.0)])
    assert compiled == ["W2, 4 ranks, nvlink: 3.0% of the step are exposed (compiled), 2% are allowed"]
