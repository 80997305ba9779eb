"""reinplace: updates write into their inputs, temporaries are reused, and no bit of a result changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

import wholestep as ws
from tests.unit import builders
from tests.unit.builders import aten
from tests.unit.passes.memory.reinplaced import assert_results_last, check, copies, scheduled
from tests.unit.place.test_sharded import placed
from wholestep.cost.cost_model import CostModel
from wholestep.ir import graph_edit, op_info
from wholestep.ir.program import InputKind, OutputKind, Program
from wholestep.lower.base import eager_backend
from wholestep.passes.default_passes import passes_of
from wholestep.passes.pass_manager import run_passes


def adamw_step(variant: str) -> tuple[Any, list[torch.Tensor]]:
    shapes = [(6, 4), (4,), ()]
    flags = {"foreach": variant == "foreach", "fused": variant == "fused"}

    def step(*tensors: torch.Tensor) -> None:
        params, grads, avgs, sqs, steps = (list(tensors[i : i + 3]) for i in range(0, 15, 3))
        lr = 1e-3 if variant == "fused" else tensors[15].item()
        adamw(
            params, grads, avgs, sqs, [], steps, amsgrad=False, beta1=0.9, beta2=0.999, lr=lr,
            weight_decay=0.01, eps=1e-8, maximize=False, **flags,
        )  # fmt: skip

    generator = torch.Generator().manual_seed(0)
    tensors = [torch.rand(shape, generator=generator) for _ in range(4) for shape in shapes]
    return step, [*tensors, *(torch.tensor(3.0) for _ in shapes), torch.tensor(1e-3, dtype=torch.float64)]


@pytest.mark.parametrize("variant", ["single", "foreach", "fused"])
def test_adamw_copies_no_parameter_and_no_state(variant):
    step, tensors = adamw_step(variant)
    program = builders.capture(step, tensors)
    after = check(program, tensors)
    assert copies(after) == 0
    assert set(after.results) == {None}
    called = builders.calls(after)
    wanted = {"single": "aten.addcdiv_.default", "foreach": "aten._foreach_addcdiv_.ScalarList"}
    assert wanted.get(variant, "aten._fused_adamw_.default") in called
    assert any(note.startswith("0 B of inputs") for note in after.history[-1].notes)


@pytest.mark.parametrize("variant", ["single", "foreach", "fused"])
def test_adamw_writes_into_the_tensors_it_is_given(variant):
    step, tensors = adamw_step(variant)
    after = scheduled(builders.capture(step, tensors))
    expected = [tensor.clone() for tensor in tensors]
    step(*expected)
    pointers = [tensor.data_ptr() for tensor in tensors]
    with torch.no_grad():
        eager_backend.lower(after)(list(tensors))
    assert builders.same(tensors, expected)
    assert pointers == [tensor.data_ptr() for tensor in tensors]


def test_an_adamw_update_allocates_less_than_twice_the_parameters():
    """Alive at once besides the inputs: the denominator, and nothing of parameter size next to it."""
    step, tensors = adamw_step("single")
    tensors = [tensor.new_zeros(1000, 10) if tensor.shape == (6, 4) else tensor for tensor in tensors]
    program = builders.capture(step, tensors)
    parameter_bytes = 1000 * 10 * 4
    peaks = []
    for one in (program, scheduled(program)):
        inputs = [tensor.clone() for tensor in tensors]
        run = eager_backend.lower(one)
        with torch.no_grad(), builders.live_bytes() as live:
            live.know(inputs)
            run(inputs)
        peaks.append(live.peak / parameter_bytes)
    assert peaks[0] > 3
    assert peaks[1] < 1.1


def test_fused_update_leaves_gradients_that_are_returned():
    """The schema says that grads are written to; without a scale they are not, and need no copy."""
    step, tensors = adamw_step("fused")

    def and_grads(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        grads = [arg * 2 for arg in args[3:6]]
        step(*args[:3], *grads, *args[6:])
        return tuple(grads)

    after = check(builders.capture(and_grads, tensors), tensors)
    assert copies(after) == 0
    assert "aten._fused_adamw_.default" in builders.calls(after)


@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_read_behind_a_fused_update_are_copied_only_if_it_unscales_them(scaled):
    def fn(param, grad, avg, sq, step, scale):
        grad = grad * 2
        new = aten._fused_adamw.default(
            [param], [grad], [avg], [sq], [], [step], lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-8,
            amsgrad=False, maximize=False, grad_scale=scale if scaled else None,
        )  # fmt: skip
        for old, values in zip((param, avg, sq), (new[0], new[2], new[3]), strict=True):
            old.copy_(values[0])
        return grad

    tensors = [*(torch.rand(8) for _ in range(4)), torch.tensor(2.0), torch.tensor(4.0)]
    after = check(builders.capture(fn, tensors), tensors)
    assert builders.calls(after)[-1] == "aten._fused_adamw_.default"
    assert builders.count(after, aten.clone.default) == scaled


@pytest.mark.parametrize("foreach", [False, True])
def test_sgd_with_momentum(foreach):
    def step(p, q, g, h, m, n):
        sgd(
            [p, q], [g, h], [m, n], foreach=foreach, weight_decay=0.1, momentum=0.9, lr=0.1,
            dampening=0.0, nesterov=True, maximize=False,
        )  # fmt: skip

    tensors = [torch.randn(shape) for _ in range(3) for shape in ((5, 3), (3,))]
    after = check(builders.capture(step, tensors), tensors)
    assert copies(after) == 0


def test_temporaries_are_reused():
    def fn(x):
        return (x * 2).relu().sigmoid().add(1)

    after = check(builders.capture(fn, [torch.randn(4)]), [torch.randn(4)])
    assert builders.calls(after) == [
        "aten.mul.Tensor",
        "aten.relu_.default",
        "aten.sigmoid_.default",
        "aten.add_.Tensor",
    ]


def freeing(kind: InputKind) -> Program:
    """``x.sin()``, then the memory of x is given up."""
    program = builders.capture(lambda x: (x.sin(), x.mul_(2))[0], [torch.ones(3)], kinds=[kind])
    (mul,) = program.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    with program.graph.inserting_before(mul):
        graph_edit.replace_node(mul, graph_edit.emit(program.graph, op_info.RESIZE_STORAGE, mul.args[0], 0))
    return program


def test_memory_is_given_up_where_the_step_does_it():
    program = scheduled(freeing(InputKind.USER))
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert targets == [aten.sin.default, op_info.RESIZE_STORAGE_]


def test_memory_is_not_given_up_before_its_last_reader():
    program = freeing(InputKind.USER)
    sin, free = [node for node in program.graph.nodes if node.op == "call_function"]
    free.append(sin)  # as a pass may have ordered them
    program = scheduled(program)
    assert [node.target for node in program.graph.nodes if node.op == "call_function"][-1] is op_info.RESIZE_STORAGE_
    x = torch.ones(3)
    (result,) = eager_backend.lower(program)([x])  # the write is done and left out
    assert torch.equal(result, torch.ones(3).sin())
    assert x.untyped_storage().size() == 0


def test_a_value_read_later_stays():
    def fn(x):
        y = x * 2
        return y.relu() + y

    after = check(builders.capture(fn, [torch.randn(4)]), [torch.randn(4)])
    assert builders.calls(after) == ["aten.mul.Tensor", "aten.relu.default", "aten.add_.Tensor"]


def test_a_view_that_is_read_later_keeps_its_base():
    def fn(x):
        y = x * 2
        view = y.t()[1:]
        return y.relu(), view + 1

    after = check(builders.capture(fn, [torch.randn(4, 4)]), [torch.randn(4, 4)])
    assert "aten.relu.default" in builders.calls(after)


def test_parts_of_one_buffer_that_do_not_meet_are_overwritten_one_by_one():
    def fn(x):
        y = x * 2
        top, bottom = y.split(2)
        return top.relu(), bottom.sigmoid()

    after = check(builders.capture(fn, [torch.randn(4, 4)]), [torch.randn(4, 4)])
    assert {"aten.relu_.default", "aten.sigmoid_.default"} <= set(builders.calls(after))


def test_the_same_tensor_twice_in_an_elementwise_call_is_fine():
    def fn(x):
        y = x + 1
        return y * y

    after = check(builders.capture(fn, [torch.randn(4)]), [torch.randn(4)])
    assert "aten.mul_.Tensor" in builders.calls(after)


def test_another_view_of_the_same_memory_in_the_call_is_not():
    def fn(x):
        y = x + 1
        return y * y.t()

    tensors = [torch.randn(4, 4)]
    assert "aten.mul.Tensor" in builders.calls(check(builders.capture(fn, tensors), tensors))


def test_broadcasting_and_promotion_do_not_go_in_place():
    def fn(x, row, n):
        return (row + 1) * (x + 1), (n + 1) * 0.5

    tensors = [torch.randn(4, 3), torch.randn(3), torch.arange(3)]
    assert builders.calls(check(builders.capture(fn, tensors), tensors))[2] == "aten.mul.Tensor"


def test_an_input_without_a_write_is_never_touched():
    def fn(x):
        return x.mul(2)

    after = check(builders.capture(fn, [torch.randn(4)]), [torch.randn(4)])
    assert builders.calls(after) == ["aten.mul.Tensor"]


def test_a_constant_is_never_touched():
    constant = torch.ones(3)

    def fn(x):
        return constant.mul(2) + x

    program = builders.capture(fn, [torch.randn(3)])
    check(program, [torch.randn(3)])
    assert constant.equal(torch.ones(3))


def test_a_value_that_cannot_be_in_place_is_copied_at_the_end():
    def fn(weight, x):
        weight.copy_(x @ x)

    tensors = [torch.randn(4, 4), torch.randn(4, 4)]
    after = check(builders.capture(fn, tensors), tensors)
    assert builders.calls(after) == ["aten.mm.default", "aten.copy_.default"]
    assert any("64 B of inputs are copied" in note for note in after.history[-1].notes)


def test_copies_of_one_type_are_one_call():
    def fn(a, b, c, x):
        a.copy_(x @ x)
        b.copy_(x @ x.t())
        c.copy_((x @ x).double())

    tensors = [*(torch.randn(4, 4) for _ in range(2)), torch.randn(4, 4).double(), torch.randn(4, 4)]
    after = check(builders.capture(fn, tensors), tensors)
    assert builders.count(after, aten._foreach_copy_.default) == 1
    assert builders.count(after, aten.copy_.default) == 1


def test_two_buffers_that_swap():
    program = swapped(builders.capture(lambda a, b: (a.add_(1), b.add_(1)), [torch.zeros(3), torch.ones(3)]))
    _, inputs = builders.execute(scheduled(program), [torch.zeros(3), torch.ones(3)])
    assert builders.same(inputs, [torch.ones(3), torch.zeros(3)])


def swapped(program: Program) -> Program:
    """WRITE a := b and WRITE b := a; what functionalisation gives for a swap by way of clones, without the clones."""
    writes = tuple(output for output in program.outputs if output.kind is OutputKind.WRITE)
    first, second = program.placeholders
    program.graph.output_node().args = ((second, first),)
    return replace(program, outputs=writes)


def test_a_write_of_an_input_to_itself_is_dropped():
    program = builders.capture(lambda a: a.add_(1), [torch.zeros(3)])
    program.graph.output_node().args = ((program.placeholders[0],),)
    after = scheduled(replace(program, outputs=(program.outputs[1],)))
    assert after.results == (None,)
    assert copies(after) == 0


def test_a_view_of_an_input_written_through():
    def fn(weight):
        weight.view(-1).mul_(2)

    tensors = [torch.randn(4, 3)]
    after = check(builders.capture(fn, tensors), tensors)
    assert copies(after) == 0


def test_the_old_value_of_an_input_can_be_returned():
    def fn(weight):
        old = weight.clone()
        weight.mul_(2)
        return old

    program = builders.capture(fn, [torch.randn(4)])
    clone = program.graph.find_nodes(op="call_function", target=aten.clone.default)[0]
    clone.replace_all_uses_with(program.placeholders[0])  # a program is functional: without the clone it means the same
    check(program, [torch.randn(4)])


def test_what_is_returned_does_not_change_with_the_next_call():
    def fn(weight):
        new = weight * 2
        weight.copy_(new)
        return new, new.view(2, 2)

    tensors = [torch.randn(4)]
    assert_results_last(check(builders.capture(fn, tensors), tensors), tensors)


def test_a_gradient_that_accumulates_stays_in_its_memory():
    def fn(grad, x):
        grad.add_(x)

    program = builders.capture(fn, [torch.zeros(3), torch.ones(3)], kinds=[InputKind.GRAD, InputKind.USER])
    outputs = (*program.outputs[1:], replace(program.outputs[1], kind=OutputKind.GRAD, target=0))
    value = program.results[1]
    program.graph.output_node().args = ((value, value),)
    after = scheduled(replace(program, outputs=outputs))
    assert copies(after) == 0


def test_foreach_with_one_element_that_must_stay_clones_that_one():
    def fn(a, b, c, d):
        first = [x + 1 for x in (a, b, c, d)]
        second = torch._foreach_mul(first, 2.0)
        return (first[1], *second)

    tensors = [torch.randn(8) for _ in range(4)]
    after = check(builders.capture(fn, tensors), tensors)
    assert "aten._foreach_mul_.Scalar" in builders.calls(after)
    assert builders.count(after, aten.clone.default) == 1


def test_foreach_with_the_same_tensor_twice():
    def fn(a, b):
        y = a + b
        return tuple(torch._foreach_mul([y, y], 2.0))

    tensors = [torch.randn(3), torch.randn(3)]
    check(builders.capture(fn, tensors), tensors)


def test_foreach_with_lists_that_cross():
    def fn(a, b):
        y = [a + 1, b + 1]
        return tuple(torch._foreach_mul(y, [y[1], y[0]]))

    tensors = [torch.randn(3), torch.randn(3)]
    assert "aten._foreach_mul.List" in builders.calls(check(builders.capture(fn, tensors), tensors))


def test_what_one_call_scatters_is_overwritten_only_behind_the_last_wait():
    """Gloo copies all results of a call again at every wait for one of them."""

    def step(model: Any, opt: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        torch.nn.functional.cross_entropy(model(x), y).backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.05, foreach=False)
        opt.step()

    program = placed(ws.FSDP(), optimizer="sgd", step=step)
    after = run_passes(program, passes_of(cost=CostModel.default("cpu+gloo"), bucket_bytes=1 << 20))
    [scatter] = after.graph.find_nodes(op="call_function", target=op_info.c10d.reduce_scatter_tensor_coalesced.default)
    place = graph_edit.positions(after.graph)
    writes = [place[node] for node in after.graph.find_nodes(op="call_function", target=aten.clamp_.default)]
    last_wait = max(place[wait] for wait in op_info.waits(scatter))
    assert len(op_info.waits(scatter)) == 6
    assert len(writes) == len([write for write in writes if write > last_wait]) == 1  # the others are not in place
