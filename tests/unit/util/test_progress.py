"""The spinner of a call that compiles: its stages, where it is shown and where it is not."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

import wholestep as ws
from wholestep.lower.inductor import segment_compiler
from wholestep.util import progress


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=80)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_stage_is_shown_and_goes_away():
    console = terminal()
    with progress.progress_shown("train_step", 0, console):
        progress.report_stage("compiling segment 2 of 5")
    assert "train_step: compiling segment 2 of 5" in written(console)
    assert written(console).endswith("\x1b[2K")  # the line is empty again
    before = written(console)
    progress.report_stage("planning")
    assert written(console) == before


@pytest.mark.parametrize(("rank", "is_terminal"), [(1, True), (0, False)])
def test_other_ranks_and_files_show_nothing(rank, is_terminal):
    console = Console(file=io.StringIO(), force_terminal=is_terminal)
    with progress.progress_shown("train_step", rank, console):
        progress.report_stage("capturing")
    assert written(console) == ""


def test_an_error_ends_it_and_one_inside_another_adds_none():
    outer, inner = terminal(), terminal()

    def fails() -> None:
        with progress.progress_shown("outer", 0, outer):
            with progress.progress_shown("inner", 0, inner):
                progress.report_stage("capturing")
            raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        fails()
    assert written(inner) == ""
    assert "outer: capturing" in written(outer)
    assert progress._shown == []


def test_a_call_tells_its_stages_in_order(monkeypatch):
    told: list[str] = []
    for module in ("wholestep.api.stages.report_stage", "wholestep.lower.program_compiler.report_stage"):
        monkeypatch.setattr(module, told.append)
    monkeypatch.setattr(segment_compiler.SegmentCompiler, "begin", lambda self, segment: None)
    monkeypatch.setattr(segment_compiler.SegmentCompiler, "compile", lambda self, segment: segment)  # node by node
    step = ws.compile(lambda x: ((x + 1).tanh() + torch.rand_like(x)).exp(), backend="inductor")
    step(torch.ones(4))
    assert told[:2] == ["capturing", "planning"]
    number = len(told) - 3
    segments = [f"compiling segment {place} of {number}" for place in range(1, number + 1)]
    assert told[2:] == [*segments, "waiting for kernels"]
    assert number
    step(torch.ones(4))
    assert len(told) == number + 3
