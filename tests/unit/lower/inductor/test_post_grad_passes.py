"""Passes over what Inductor is about to lower."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache
from torch.fx.experimental.proxy_tensor import make_fx

from tests.unit import builders
from wholestep.ir.segment import segments_of
from wholestep.lower.inductor import compile_fx, segment_compiler
from wholestep.lower.inductor.post_grad_passes import PostGradPasses, keep_values
from wholestep.passes.pass_manager import run_passes
from wholestep.passes.schedule.form_segments import form_segments

aten = torch.ops.aten


class Noted(CustomGraphPass):
    """A pass of the user's."""

    def __init__(self, name: str | None = "theirs") -> None:
        self.name, self.seen = name, list[list[Any]]()

    def __call__(self, graph: fx.Graph) -> None:
        self.seen.append([node.target for node in graph.nodes])

    def uuid(self) -> object | None:
        return self.name


def note(graph: fx.Graph) -> None: ...


def test_passes_of_the_user_run_before_and_name_the_cache_too() -> None:
    theirs, graph = Noted(), make_fx(torch.mm, tracing_mode="fake")(torch.empty(4, 4), torch.empty(4, 4)).graph
    ran = list[int]()
    for others in (theirs, [theirs], (theirs, theirs)):
        ours = PostGradPasses(others, {"own": lambda graph: ran.append(len(theirs.seen))})
        ours(graph)
        assert ours.uuid() != PostGradPasses(None, {"own": note}).uuid()
    assert ran == [1, 2, 4]
    assert PostGradPasses([theirs, note], {"own": note}).uuid() is None
    assert PostGradPasses(Noted(None), {"own": note}).uuid() is None
    assert PostGradPasses(None, {"own": note}).uuid() == PostGradPasses([], {"own": note}).uuid() is not None
    assert PostGradPasses(None, {"own": note}).uuid() != PostGradPasses(None, {"other": note}).uuid()


def swap(a: Tensor, b: Tensor) -> list[Tensor]:
    return [b.clone(), a.clone(), (a * b).sin()]


def shift(a: Tensor, b: Tensor) -> list[Tensor]:
    return [a * 0.9 + b.sin(), a.clone(), a + b]


def turn(a: Tensor, b: Tensor) -> list[Tensor]:
    """One that is seen in another way, and a rotation."""
    return [b.t().clone(), a.t().clone(), a + b]


def no_change(a: Tensor, b: Tensor) -> list[Tensor]:
    """What becomes nothing in other ways."""
    return [b.sin(), aten.pow.Tensor_Scalar(a, 1) + 0.0 * b, aten.repeat.default(a, [1, 1])]


def part(a: Tensor, b: Tensor) -> list[Tensor]:
    """A part of an input is changed, and nobody stores that."""
    return [aten.select_scatter.default(a, a.select(1, 2) * b.select(0, 0), 1, 2), b.sin()]


def part_seen_otherwise(a: Tensor, b: Tensor) -> list[Tensor]:
    changed = aten.slice_scatter.default(a.t(), b[:2] * 2, 0, 1, 3)
    return [changed, changed.t().clone(), b.sin()]


def part_stored_and_returned(a: Tensor, b: Tensor) -> list[Tensor]:
    changed = aten.select_scatter.default(a, a.select(1, 2) * b.select(0, 0), 1, 2)
    return [changed, b.sin(), changed.clone()]


def lists(a: Tensor, b: Tensor) -> list[Tensor]:
    """What Inductor would write to its targets in turn."""
    added = (b - a) + a.t() * 2
    return list(aten._foreach_copy.default([b, a], [a.clone(), added.clone()]))


def crossed(a: Tensor, b: Tensor) -> list[Tensor]:
    """What a list gives is stored in other places than it stands in."""
    first, second = aten._foreach_add.List([a, b], [b.sin(), a.cos()])
    return [first, second]


def read_by_another(a: Tensor, b: Tensor) -> list[Tensor]:
    """What the second of a list adds is read from the first."""
    return list(aten._foreach_add.List([a, b], [b.sin(), a * 2]))


def read_elsewhere(a: Tensor, b: Tensor) -> list[Tensor]:
    return list(aten._foreach_mul.List([a, b], [a.t() + 1, b.flip(0)]))


def returned_too(a: Tensor, b: Tensor) -> list[Tensor]:
    first, second = aten._foreach_add.List([a, b], [b.sin(), b.cos()])
    return [first, second, first.clone(), a.t().clone()]


def rows_of_its_own(a: Tensor, b: Tensor) -> list[Tensor]:
    """Rows of a tensor are put where others of it lie, of an input and of a value."""
    order, value = torch.arange(15, -1, -1), b.sin()
    changed = aten.index_copy.default(value, 0, order[:8], value[4:12].clone())
    return [aten.index_copy.default(a, 0, order, a.clone()), changed]


def rows_behind_rows(a: Tensor, b: Tensor) -> list[Tensor]:
    order = torch.arange(15, -1, -1)
    first = aten.index_copy.default(a, 0, order[:4], b[:4])
    return [aten.index_copy.default(first, 0, order, first.t().clone()), b.sin()]


Stored = Sequence[tuple[int, int]]
"""Arguments of a function, and its results that are written to them."""


@pytest.mark.parametrize(
    ("fn", "stored"),
    [
        (swap, [(0, 0), (1, 1)]), (swap, [(1, 1), (0, 0)]), (shift, [(0, 0), (1, 1)]), (shift, [(1, 1), (0, 0)]),
        (turn, [(0, 0), (1, 1)]), (no_change, [(0, 0), (1, 2)]), (no_change, [(1, 2), (0, 0)]),
        (part, [(0, 1)]), (part_seen_otherwise, [(0, 2)]), (part_stored_and_returned, [(0, 0)]),
        (part_stored_and_returned, [(0, 1)]), (lists, [(1, 0), (0, 1)]), (lists, [(0, 1), (1, 0)]),
        (crossed, [(0, 1), (1, 0)]), (crossed, [(0, 0), (1, 1)]), (read_by_another, [(0, 0), (1, 1)]),
        (read_elsewhere, [(0, 0), (1, 1)]), (returned_too, [(0, 0), (1, 1)]), (rows_of_its_own, [(0, 0)]),
        (rows_of_its_own, [(1, 1)]), (rows_of_its_own, []), (rows_behind_rows, [(0, 0)]),
    ],
)  # fmt: skip
def test_inputs_keep_their_values_as_long_as_those_are_wanted(fn: Callable[..., list[Tensor]], stored: Stored) -> None:
    torch.manual_seed(0)
    given = [torch.randn(16, 16), torch.randn(16, 16)]
    program = builders.without_gradients(builders.capture(fn, given))
    program = run_passes(program, [partial(form_segments, compiles=segment_compiler.compiles)])
    (segment,) = segments_of(program)
    names = [node.name for node in segment.graph.find_nodes(op="placeholder")]
    places = [node.args[1] for node in program.results[0]]
    pairs = ((names.index(f"arg{number}_1"), places[result]) for number, result in stored)
    segment = replace(segment, stored=tuple(pairs))
    with fresh_cache():
        compiled = compile_fx.begin_compile(segment, early_launches=False, own_products=False).finish()
    (found, ours), (wanted, theirs) = ((run, [one.clone() for one in given]) for run in (compiled, segment))
    found_results = found(list(ours))
    for one, other in zip(found_results, wanted(list(theirs)), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)
    changed = 0
    for one, other, before in zip(ours, theirs, given, strict=True):
        torch.testing.assert_close(one, other)
        changed += not torch.equal(one, before)
    assert changed == len(stored)
    kept = [one.clone() for one in found_results if one is not None]
    for one in ours:
        one.zero_()
    assert all(map(torch.equal, kept, (one for one in found_results if one is not None)))  # they are nobody's memory


def test_nothing_is_copied_that_nobody_overwrites_before() -> None:
    def stores(a: Tensor, b: Tensor, c: Tensor) -> None:
        b.copy_(a)
        a.copy_(c)
        c.copy_(a.sin())

    a, b, c = (torch.empty(4) for _ in range(3))
    graph = make_fx(stores, tracing_mode="fake")(a, b, c).graph
    assert keep_values(graph) == 0


def test_a_swap_takes_one_copy() -> None:
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    for target, value in ((a, b), (b, a)):
        graph.call_function(aten.copy_.default, (target, value))
    graph.output(())
    assert keep_values(graph) == 1
    assert [node.target for node in graph.nodes][2:5] == [aten.clone.default, aten.copy_.default, aten.copy_.default]
    first, second = graph.find_nodes(op="call_function", target=aten.copy_.default)
    assert first.args == (a, b)
    assert second.args[1].args == (a,)


def test_rows_of_an_input_are_put_into_a_copy() -> None:
    def put(a: Tensor, b: Tensor, where: Tensor) -> Tensor:
        changed = aten.index_put.default(a, [where], b)
        a.copy_(a * 2)
        return changed

    def stored(a: Tensor, b: Tensor, where: Tensor) -> None:
        a.copy_(aten.index_put.default(a, [where], b))

    given = torch.empty(4, 2), torch.empty(3, 2), torch.arange(3)
    assert keep_values(make_fx(put, tracing_mode="fake")(*given).graph) == 1
    assert keep_values(make_fx(stored, tracing_mode="fake")(*given).graph) == 0


def test_rows_that_are_read_while_rows_are_written_are_copied() -> None:
    def moved(a: Tensor, b: Tensor, where: Tensor, by: Callable[..., Tensor]) -> None:
        a.copy_(aten.index_put.default(a, [where], by(a, b)))

    given = torch.empty(4, 2), torch.empty(4, 2), torch.arange(2)
    for by, copies in ((lambda a, b: a[2:], 1), (lambda a, b: b[2:], 0), (lambda a, b: a.sin()[:2], 0)):
        assert keep_values(make_fx(partial(moved, by=by), tracing_mode="fake")(*given).graph) == copies


def test_a_number_to_the_power_of_a_list_writes_to_nothing() -> None:
    def powers(a: Tensor, b: Tensor) -> None:
        for old, new in zip([a, b], aten._foreach_pow.ScalarAndTensor(2.0, [b, a]), strict=True):
            old.copy_(new)

    assert keep_values(make_fx(powers, tracing_mode="fake")(torch.rand(3), torch.rand(3)).graph) == 0


def test_updates_of_optimizers_take_no_copies() -> None:
    """Each writes to its own place what it has read there."""

    def update(p: list[Tensor], m: list[Tensor], g: list[Tensor]) -> None:
        grads = aten._foreach_add.List(g, p, alpha=0.1)
        means = aten._foreach_lerp.Scalar(m, grads, 0.1)
        made = aten._foreach_addcdiv.Scalar(p, means, aten._foreach_add.Scalar(aten._foreach_sqrt.default(means), 1e-8))
        for old, new in zip([*p, *m], [*made, *means], strict=True):
            old.copy_(new)

    tensors = [[torch.rand(3) for _ in range(4)] for _ in range(3)]
    assert keep_values(make_fx(update, tracing_mode="fake")(*tensors).graph) == 0
