"""cleanup drops second names, marks and dead code, and nothing that has an effect."""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch

from tests.unit import builders
from tests.unit.builders import aten, c10d
from wholestep.ir import graph_edit, op_info
from wholestep.ir.program import Program
from wholestep.passes.pass_manager import run_passes
from wholestep.passes.rewrites.dead_code import eliminate_dead_code


def check(program: Program, tensors: list[torch.Tensor]) -> Program:
    after = run_passes(builders.without_gradients(program), [eliminate_dead_code])
    results = []
    for one in (program, after):
        torch.manual_seed(0)
        results.append(builders.execute(one, tensors))
    assert builders.same(*results)
    return after


def calls(fn, *tensors: torch.Tensor) -> list[str]:
    return builders.calls(check(builders.capture(fn, list(tensors)), list(tensors)))


SQUARE = torch.randn(4, 4)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.detach(),
        lambda x: x.t().t(),
        lambda x: x.view(16).view(4, 4),
        lambda x: x.view(2, 8).view(16).view(4, 4),
        lambda x: x.permute(0, 1),
        lambda x: x[:],
        lambda x: x.expand(4, 4),
        lambda x: x.unsqueeze(0).squeeze(0),
        lambda x: x.transpose(0, 1).detach().t(),
    ],
)
def test_views_that_lead_back_go(view):
    assert calls(lambda x: view(x).relu(), SQUARE) == ["aten.relu.default"]


@pytest.mark.parametrize(
    ("view", "left"),
    [
        (lambda x: x.t(), "aten.t.default"),
        (lambda x: x[1:], "aten.slice.Tensor"),
        (lambda x: x[1:].unsqueeze(0).squeeze(0), "aten.slice.Tensor"),
        (lambda x: x.clone(), "aten.clone.default"),
        (lambda x: x.view(torch.int32), "aten.view.dtype"),
    ],
)
def test_views_that_lead_elsewhere_stay(view, left):
    assert calls(lambda x: view(x).relu(), SQUARE) == [left, "aten.relu.default"]


def test_a_conjugate_is_not_what_it_views():
    x = torch.randn(3, dtype=torch.complex64)
    assert "aten._conj.default" in calls(lambda x: torch.view_as_real(x.conj().resolve_conj()) + 1, x)


def test_a_returned_view_of_an_input_stays_a_tensor_of_its_own():
    assert calls(lambda x: x.detach(), SQUARE) == ["aten.detach.default"]


def test_two_results_stay_two_tensors():
    def fn(x):
        y = x + 1
        return y, y.detach()

    assert calls(fn, SQUARE) == ["aten.add.Tensor", "aten.detach.default"]


def test_two_returned_views_stay_two_tensors():
    def fn(x):
        y = x + 1
        return y.detach(), y.detach()

    assert calls(fn, SQUARE) == ["aten.add.Tensor", "aten.detach.default"]


def test_a_returned_view_of_a_temporary_goes():
    assert calls(lambda x: (x + 1).detach(), SQUARE) == ["aten.add.Tensor"]


def test_a_write_needs_no_copy():
    def fn(weight, x):
        weight.copy_(x @ x)

    assert calls(fn, SQUARE, SQUARE) == ["aten.mm.default"]


def test_a_write_in_another_order_of_memory_needs_no_copy_unless_it_is_read():
    def write(weight, x):
        weight.copy_((x @ x).t())

    def write_and_read(weight, x):
        weight.copy_((x @ x).t())
        return weight.view(-1)[1:] * 2

    assert calls(write, SQUARE, SQUARE) == ["aten.mm.default", "aten.t.default"]
    assert "aten.copy.default" in calls(write_and_read, SQUARE, SQUARE)


@pytest.mark.parametrize("source", [lambda x: (x @ x).double(), lambda x: (x @ x)[0]])
def test_a_copy_that_changes_type_or_shape_stays(source):
    def fn(weight, x):
        weight.copy_(source(x))

    assert "aten.copy.default" in calls(fn, SQUARE, SQUARE)


def test_dead_code_goes_and_random_operators_stay():
    def fn(x):
        torch.rand(3)
        (x * 2).sum()
        return torch.rand(3) + x

    assert calls(fn, torch.ones(3)) == ["aten.rand.default", "aten.rand.default", "aten.add.Tensor"]


def test_an_assertion_stays():
    def fn(x):
        torch._assert_async(x.sum() > 0)
        return x + 1

    assert "aten._assert_async.default" in calls(fn, torch.ones(3))


def test_profiler_marks_go():
    def fn(x):
        with torch.profiler.record_function("Optimizer.step"):
            return x * 2

    assert calls(fn, torch.ones(3)) == ["aten.mul.Tensor"]


def test_marks_that_survived_tracing_go():
    program = builders.without_gradients(builders.capture(lambda x: x * 2, [torch.ones(3)]))
    enter, leave = torch.ops.profiler._record_function_enter_new.default, torch.ops.profiler._record_function_exit
    (mul,) = program.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    with program.graph.inserting_before(mul):
        mark = program.graph.call_function(enter, ("Optimizer.step", None))
    with program.graph.inserting_after(mul):
        program.graph.call_function(leave._RecordFunction, (mark,))
    assert builders.calls(eliminate_dead_code(graph_edit.copy(program))) == ["aten.mul.Tensor"]


def test_items_of_literal_lists_are_folded():
    program = builders.without_gradients(builders.capture(lambda x: x + 1, [torch.ones(3)]))
    (add,) = program.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    with program.graph.inserting_before(add):
        item = graph_edit.emit(program.graph, operator.getitem, [add.args[0], None], 0)
    add.replace_input_with(add.args[0], item)
    item.args = ([program.placeholders[0], None], 0)
    after = run_passes(program, [eliminate_dead_code])
    assert len(after.graph.nodes) == 3


def test_collectives_that_are_read_stay():
    def fn(x):
        return op_info.WAIT(c10d.all_reduce.default(x, "sum", builders.world_group()))

    program = builders.place(builders.capture(fn, [torch.ones(3)]))
    assert builders.count(run_passes(program, [eliminate_dead_code]), c10d.all_reduce.default, op_info.WAIT) == 2


def test_notes_say_what_went():
    program = builders.without_gradients(builders.capture(lambda x: x.t().t() + 1, [SQUARE]))
    (note,) = run_passes(replace(program), [eliminate_dead_code]).history[0].notes
    assert note == "dropped 0 profiler marks, 1 views and 0 copies of what was there, 1 dead nodes"


def set_item(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x * 1
    x[0, 1:], x[2] = 0.1, -7
    return x + y.masked_fill(y > 0, torch.tensor(0.3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_numbers_that_fill_a_tensor_are_no_tensors(dtype):
    given = [torch.arange(16.0).view(4, 4).to(dtype), torch.arange(-8.0, 8).view(4, 4).to(dtype)]
    before = builders.capture(set_item, given)
    names = ("aten.fill.Tensor", "aten.masked_fill.Tensor", "aten.lift_fresh_copy.default")
    assert [builders.calls(before).count(name) for name in names] == [2, 1, 3]
    found = builders.calls(check(before, given))
    assert [found.count(name) for name in names] == [0, 0, 0]
    assert [found.count(name.replace("Tensor", "Scalar")) for name in names[:2]] == [2, 1]


def test_tensors_of_other_values_still_fill():
    given = [SQUARE, torch.tensor(3.0)]
    assert "aten.fill.Tensor" in calls(lambda x, y: (x * 1).fill_(y + 1), *given)
