"""Programs as bytes: the nodes of a segment are read when somebody asks for them, and not before."""

from __future__ import annotations

import cProfile
import functools
import pstats
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit import builders
from wholestep.ir import serializer
from wholestep.ir.program import Program
from wholestep.ir.segment import Segment
from wholestep.lower.inductor import segment_compiler
from wholestep.passes.memory.reinplace import reinplace
from wholestep.passes.pass_manager import run_passes
from wholestep.passes.schedule.form_segments import form_segments


def step(x: Tensor, weight: Tensor) -> Tensor:
    """Two products, and what a compiler may have before them, between them and after."""
    hidden = (x.sin() * 2) @ weight
    total = (hidden.cos() + 1) @ weight
    weight.mul_(0.5).add_(1.0)
    return total.exp() / 3


def tensors() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw) for shape in ((2, 4), (4, 4))]


def with_segments() -> Program:
    """Three segments; the last one writes to an input."""
    compiles = partial(
        form_segments,
        compiles=lambda node: segment_compiler.compiles(node) and not segment_compiler.is_library_call(node),
    )
    program = builders.without_gradients(builders.capture(step, tensors()))
    return run_passes(program, [compiles, partial(reinplace, hold_updates=True)])


def segments_of(program: Program) -> list[Segment]:
    return [node.target for node in program.graph.nodes if isinstance(node.target, Segment)]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many nodes each graph has that is read, in order."""
    found, make = list[int](), serializer._graph_module

    @functools.wraps(make)  # pickle finds it by its name
    def noting(records: list[tuple[Any, ...]], attributes: dict[str, Any]) -> Any:
        found.append(len(records))
        return make(records, attributes)

    monkeypatch.setattr(serializer, "_graph_module", noting)
    return found


def test_a_program_is_read_without_its_segments(read: list[int]) -> None:
    here = with_segments()
    there = serializer.loads(serializer.dumps(here))
    assert read == [len(here.graph.nodes)]
    ours, theirs = segments_of(here), segments_of(there)
    assert len(ours) == len(theirs) == 3
    assert len({one.likeness for one in ours}) == 3
    for one, other in zip(ours, theirs, strict=True):
        assert (other.name, other.stored, other.likeness) == (one.name, one.stored, one.likeness)
    assert [bool(one.stored) for one in theirs] == [False, False, True]
    assert len(read) == 1, "what a segment does is told"


def test_a_segment_is_read_once_when_somebody_asks(read: list[int]) -> None:
    here = with_segments()
    first, second, third = segments_of(serializer.loads(serializer.dumps(here)))
    read.clear()
    assert third.module is third.module
    assert replace(third, stored=()).module is third.module, "the same nodes"
    assert read == [len(segments_of(here)[2].graph.nodes)]
    assert [call.target for call in third.calls] == [call.target for call in segments_of(here)[2].calls]
    assert first.module is not second.module
    assert len(read) == 3


def test_plain_values_are_asked_nothing() -> None:
    """They are most of a program, and pickle asks about each of them: one call, and no more after it."""
    profile = cProfile.Profile()
    numbers = [float(number) for number in range(1000)]
    profile.runcall(serializer.dumps, [numbers, tuple(map(str, numbers)), dict.fromkeys(numbers)])
    asked = 4 * len(numbers)
    assert asked <= pstats.Stats(profile).total_calls < 1.5 * asked  # type: ignore[attr-defined]


def test_what_is_told_is_what_the_nodes_say() -> None:
    here = with_segments()
    for one, other in zip(segments_of(here), segments_of(serializer.loads(serializer.dumps(here))), strict=True):
        found = replace(other, told="")
        assert "aten" in found.does
        assert found.likeness == other.likeness == one.likeness


def test_another_place_of_results_changes_the_likeness_in_that_alone(read: list[int]) -> None:
    third = segments_of(serializer.loads(serializer.dumps(with_segments())))[2]
    for stored in ((), ((0, 1),)):
        other = replace(third, stored=stored)
        assert other.does == third.does
        assert third.likeness.removesuffix(f"\n{third.stored}") == other.likeness.removesuffix(f"\n{stored}")
        assert other.likeness != third.likeness
    assert len(read) == 1


def test_a_program_that_was_read_runs_with_the_same_bits_and_can_be_written_again(read: list[int]) -> None:
    here = with_segments()
    there = serializer.loads(serializer.dumps(here))
    again = serializer.loads(serializer.dumps(there))
    results = [builders.execute(one, tensors()) for one in (here, there, again)]
    assert builders.same(results[0], results[1])
    assert builders.same(results[0], results[2])
    assert len(read) == 2 * (1 + 3), "each graph of the two once"
