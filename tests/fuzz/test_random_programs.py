"""Random training steps over random object graphs do what eager code does: `python -m benchmarks.random_programs`."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

import wholestep as ws
from benchmarks.idioms import compare
from benchmarks.random_programs import __main__ as command
from benchmarks.random_programs.grammar import STAGES
from benchmarks.random_programs.judge import judged, shrunk
from benchmarks.random_programs.program import Line, random_program

PROGRAMS = 40


@pytest.fixture
def may_go_live() -> bool:
    """Whether steps that a test compiles may go live: most of these do."""
    return True


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_a_program_does_what_eager_code_does(seed: int) -> None:
    found = judged(random_program(seed))
    assert found.holds, shrunk(found).told


# A fuzz shall find something.


def test_programs_are_of_every_kind_and_most_run() -> None:
    kinds = [judged(random_program(seed)).kind for seed in range(1000, 1010)]
    assert {"pure", "live"} <= set(kinds)
    assert sum(one in ("pure", "live") for one in kinds) >= 8


def test_a_seed_is_one_program() -> None:
    assert random_program(7) == random_program(7)
    assert random_program(7) != random_program(8)
    assert len({random_program(seed).text for seed in range(100)}) == 100


COMPILE = ws.compile


def drawing_once_more(step: Any, **options: Any) -> Any:
    """A compiled step that moves torch's random state."""
    compiled = COMPILE(step, **options)

    def called(*args: Any) -> Any:
        result = compiled(*args)
        torch.rand(())
        return result

    called.explain = compiled.explain  # type: ignore[attr-defined]
    return called


def test_a_fault_is_told_with_the_program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(compare.ws, "compile", drawing_once_more)
    monkeypatch.setattr("sys.argv", ["random_programs", "--first", "3", "--programs", "1", "--json"])
    assert command.main() == 1
    (told,) = json.loads(capsys.readouterr().out)["failures"]
    assert "random state of torch" in " ".join(told["complaints"])
    assert "def step(x, y):" in told["text"]
    assert len(told["text"].splitlines()) < len(random_program(3).text.splitlines())


def failing_where_a_key_is_written(step: Any, **options: Any) -> Any:
    return (lambda x, y: step(x, y) * 2) if "key" in step.__code__.co_consts else step


def test_a_program_shrinks_to_the_statement_that_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    written = ["history.append(1)", "table['key'] = 1", "count += 1"]
    lines = (*(Line(one, can_go=True) for one in written), Line("return x", can_go=False))
    monkeypatch.setattr(compare.ws, "compile", failing_where_a_key_is_written)
    monkeypatch.setattr(compare, "front", lambda step: ("live", 0, ""))
    found = shrunk(judged(dataclasses.replace(random_program(3), lines=lines)))
    assert [one.text for one in found.program.lines] == ["table['key'] = 1", "return x"]
    assert not any(found.program.between)


def test_every_stage_has_statements_of_its_own() -> None:
    texts = "\n".join(random_program(seed).text for seed in range(300))
    signs = ("torch.randperm(len(x))", "box.keep(loss", "clip_grad_norm_", "scheduler.step()")
    for stage, sign in zip(STAGES, signs, strict=True):
        assert sign in texts, stage
