"""Runs that repeat themselves: where they are cut, and that the numbers stay the same bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.unit import builders
from tests.unit.builders import aten
from wholestep.ir import op_info
from wholestep.ir.program import Program
from wholestep.ir.segment import Segment
from wholestep.lower.inductor import compile_fx, segment_compiler
from wholestep.passes.analysis.repeated_layers import (
    Repetition,
    _ends,
    best_unit,
    longest_repetition,
    occurrences,
    units_of,
)
from wholestep.passes.pass_manager import run_passes
from wholestep.passes.schedule.form_segments import form_segments


def anywhere(place: int) -> bool:
    return True


def test_the_longest_stretch_is_found() -> None:
    assert longest_repetition([9, 1, 2, 3, 1, 2, 3, 1, 2, 3, 8, 5, 5]) == Repetition(start=1, end=10, period=3)
    assert longest_repetition([1, 2, 3, 4]) is None
    assert longest_repetition([7, 7, 7, 7]) == Repetition(start=0, end=4, period=1)
    assert longest_repetition([1, 2, 1, 3, 1, 2, 1, 3]) == Repetition(
        start=0, end=8, period=4
    )  # and not by the 1 in the middle


@given(st.lists(st.integers(0, 3), max_size=5), st.lists(st.integers(4, 9), min_size=1, max_size=6), st.integers(2, 6))
def test_a_repeated_part_is_covered(before: list[int], part: list[int], times: int) -> None:
    found = longest_repetition([*before, *part * times, 99])
    assert found is not None
    assert found.end - found.start >= len(part) * times - 1 or found.end <= len(before)
    assert found.end - found.start >= 2 * found.period


def test_a_unit_begins_where_cuts_are_cheap_and_allowed() -> None:
    kinds = [0, *[1, 2, 3] * 4, 0]
    costs = [0, *[5, 1, 2] * 4, 0, 0]
    assert best_unit(kinds, costs, anywhere, least=1) == (2, 3, 1)
    assert best_unit(kinds, costs, lambda place: kinds[place] == 3, least=1) == (3, 1, 2)
    assert best_unit(kinds, costs, lambda place: False, least=1) == ()
    assert best_unit(kinds, costs, anywhere, least=4) == (1, 2, 3, 1, 2, 3)
    assert best_unit([1, 2, 3], [0] * 4, anywhere, least=1) == ()


def test_occurrences_do_not_overlap_and_end_where_a_cut_may_be() -> None:
    kinds = [1, 1, 1, 2, 1, 1]
    assert occurrences(kinds, (1, 1), anywhere) == [0, 4]
    assert occurrences(kinds, (1, 1), lambda place: place != 0) == [1, 4]
    assert occurrences(kinds, (1, 1), lambda place: place != 6) == [0]
    assert occurrences(kinds, (), anywhere) == []


WIDTHS = ((8,), (16, 8), (8, 16))
"""Shapes of a block's weights: of a scale, and of its two products."""


def forward(x: Tensor, weights: list[Tensor]) -> Tensor:
    """(rows, 8) -> (rows, 8), through a block per three weights."""
    for at in range(0, len(weights), 3):
        scale, up, down = weights[at : at + 3]
        x = x + F.linear(torch.tanh(F.linear(x.sigmoid() * scale, up)), down).relu()
    return x


class Allowed:
    """Where a sequence may be cut, made up."""

    def __init__(self, places: set[int], length: int) -> None:
        self._places, self.alive_bytes = places, [place % 3 for place in range(length + 1)]

    def __call__(self, place: int) -> bool:
        return place in self._places

    def shifted(self, start: int) -> Callable[[int], bool]:
        return lambda place: self(start + place)


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=40), st.sets(st.integers(0, 40))), max_size=3))
def test_the_search_ends_and_cuts_where_it_may(made_up: list[tuple[list[int], set[int]]]) -> None:
    told: Any = [(kinds, Allowed(places, len(kinds))) for kinds, places in made_up]
    units = units_of(told)
    assert len(units) == len(set(units))
    for kinds, allowed in told:
        inner = _ends(kinds, allowed, units)[1:-1]
        assert all(map(allowed, inner))


def tensors(count: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw) for shape in ((4, 8), *WIDTHS * count)]


def layers(count: int) -> Program:
    """A forward and a backward through equal blocks."""

    def step(x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        weights = [one.detach().requires_grad_() for one in given]
        loss = forward(x, weights).square().sum()
        return loss.detach(), *torch.autograd.grad(loss, weights)

    return builders.capture(step, tensors(count))


def cut(program: Program) -> Program:
    form = partial(
        form_segments,
        compiles=segment_compiler.compiles,
        by_library=segment_compiler.is_library_call,
        cuts_repeats=True,
    )
    return run_passes(program, [form])


def segments(program: Program) -> list[Segment]:
    return [node.target for node in program.graph.nodes if isinstance(node.target, Segment)]


def different(program: Program) -> int:
    return len({one.likeness for one in segments(program)})


def test_what_is_compiled_does_not_grow_with_the_layers() -> None:
    few, many = cut(layers(6)), cut(layers(12))
    assert different(few) == different(many) <= 6
    assert len(segments(many)) - len(segments(few)) == 9  # of six more layers: a backward each, a forward per two
    (note,) = [one for one in many.history[-1].notes if "segments" in one]
    assert f"in {len(segments(many))} segments ({different(many)} different)" in note


def test_pieces_begin_with_what_a_library_computes() -> None:
    for one in segments(cut(layers(6)))[1:]:
        products = (aten.mm.default, aten.addmm.default)
        inner = [node for node in one.calls if not op_info.is_view(node)]
        depends = [
            node for node in inner if node.target in products or any(arg in inner for arg in node.all_input_nodes)
        ]
        assert depends[0].target in products, one.name


def test_the_numbers_are_the_same_bits() -> None:
    (whole,) = segments(run_passes(layers(6), [partial(form_segments, compiles=segment_compiler.compiles)]))
    after = cut(layers(6))
    assert len(segments(after)) > 6
    assert sum(len(list(one.calls)) for one in segments(after)) >= len(list(whole.calls))
    wanted, found = (builders.execute(program, tensors(6))[0] for program in (layers(6), after))
    assert all(map(torch.equal, wanted, found))


def test_pieces_that_are_alike_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[fx.GraphModule] = []

    def compile_fx_inner(graph: fx.GraphModule, inputs: list[Tensor]) -> fx.GraphModule:
        compiled.append(graph)
        return graph

    monkeypatch.setattr(compile_fx, "compile_fx_inner", compile_fx_inner)
    program = cut(layers(6))
    backend = segment_compiler.SegmentCompiler(torch.device("cpu"))
    functions = [backend.compile(one) for one in segments(program)]
    assert len(compiled) == len(set(map(id, functions))) == different(program) < len(functions)


def test_an_update_is_not_cut_off_from_a_refusal_behind_it() -> None:
    """Inputs are written after the last call that may refuse its values: here after the look-up."""

    def step(seen: Tensor, index: Tensor, table: Tensor, x: Tensor, *weights: Tensor) -> Tensor:
        seen.copy_(x * 2)
        return forward(x, list(weights)) + table[index]

    program = builders.capture(step, [torch.zeros(4, 8), torch.tensor([1, 2, 3, 4]), torch.randn(5, 8), *tensors(4)])
    form = partial(
        form_segments, compiles=lambda node: segment_compiler.compiles(node) or node.target is aten.index.Tensor,
        by_library=segment_compiler.is_library_call, cuts_repeats=True,
    )  # fmt: skip
    (whole,) = segments(run_passes(program, [form]))
    assert {aten.mul.Tensor, aten.index.Tensor} <= {node.target for node in whole.calls}


def test_constants_are_arguments_of_segments() -> None:
    """Segments that are alike may read different ones."""
    held = torch.ones(3)
    (one,) = segments(cut(builders.capture(lambda x: (x + held).sin(), [torch.zeros(3)])))
    assert {node.op for node in one.graph.nodes} == {"placeholder", "call_function", "output"}
    assert len(one.graph.find_nodes(op="placeholder")) == 2
