"""Gradients that are computed in their place in the bucket."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.unit import builders
from tests.unit.builders import aten, gradient
from wholestep.cost.cost_model import CostModel
from wholestep.ir.program import Program
from wholestep.lower.base import eager_backend
from wholestep.passes.analysis.task_graph import live_bytes
from wholestep.passes.comm.bucketing import bucket_gradients
from wholestep.passes.comm.grads_as_bucket_views import grads_as_bucket_views
from wholestep.passes.memory.reinplace import reinplace
from wholestep.passes.pass_manager import run_passes

COST = CostModel.default("cpu+gloo")
X, Y = torch.randn(6, 4), torch.randn(6, 3)


def filled(fn, tensors: list[torch.Tensor]) -> tuple[Program, Program]:
    """The program before and after, which give the same bits."""
    placed = builders.place(builders.capture(fn, tensors))
    before = run_passes(placed, [partial(bucket_gradients, cost=COST, bucket_bytes=1 << 20), reinplace])
    after = run_passes(before, [grads_as_bucket_views])
    assert builders.same(builders.execute(after, tensors), builders.execute(placed, tensors))
    return before, after


def linear(x, y):
    """What the backward of a linear layer gives: weight and bias."""
    return gradient(y.t() @ x, "weight"), gradient(y.sum(0, keepdim=True).view(-1), "bias")


def test_a_bucket_of_a_linear_layer_is_filled_without_a_copy():
    before, after = filled(linear, [X, Y])
    assert builders.count(before, aten.cat.default) == 1
    assert builders.count(after, aten.cat.default, aten._foreach_copy_.default) == 0
    assert builders.count(after, aten.mm.out, aten.sum.IntList_out) == 2
    assert after.history[-1].notes[0].startswith("60 B of 60 B")


def test_a_gradient_that_is_put_together_itself_keeps_its_shape():
    """That of `nn.MultiheadAttention`, alone in its bucket."""

    def fn(x, y):
        return (gradient(torch.cat([y.t() @ x, (2 * y).t() @ x]), "weight"),)

    _, after = filled(fn, [X, Y])
    assert builders.count(after, aten.cat.default) == 1


def test_less_memory_is_alive():
    peaks = []
    x, y = torch.randn(8, 512), torch.randn(8, 256)
    for program in filled(linear, [x, y]):
        run = eager_backend.lower(program)
        with torch.no_grad(), builders.live_bytes() as live:
            live.know([x, y])
            run([x, y])
        peaks.append(live.peak)
    weight_bytes = 4 * 512 * 256
    assert peaks[0] - peaks[1] == pytest.approx(weight_bytes, rel=0.05)


def test_what_cannot_be_computed_there_is_copied():
    def fn(x, y):
        return gradient(y.t() @ x, "weight"), gradient(torch.cumsum(y[0], 0), "other")

    _, after = filled(fn, [X, Y])
    assert builders.count(after, aten.mm.out) == builders.count(after, aten._foreach_copy_.default) == 1


@pytest.mark.parametrize(("first", "copied"), [(4, 0), (8, 0), (5, 1), (6, 1), (7, 1)])
def test_a_product_is_copied_to_a_place_that_is_not_aligned(first: int, copied: int):
    """There MKL writes other bits. Sums are the same everywhere."""

    def fn(x, y, z):
        products = gradient(z.t() @ x, "first"), gradient(y.t() @ x, "second")
        return *products, gradient((y * 2).sum(0), "bias")

    _, after = filled(fn, [torch.randn(6, 5), torch.randn(6, 3), torch.randn(6, first)])
    copies = after.graph.find_nodes(op="call_function", target=aten._foreach_copy_.default)
    assert sum(len(one.args[0]) for one in copies) == copied
    assert builders.count(after, aten.mm.out) == 2 - copied
    assert builders.count(after, aten.sum.IntList_out) == 1


def test_a_bucket_that_is_mostly_copied_keeps_its_cat():
    def fn(x, y):
        return gradient(torch.cumsum(x, 0), "other"), gradient(y.sum(0), "bias")

    _, after = filled(fn, [X, Y])
    assert builders.count(after, aten.cat.default) == 1


def many(x):
    """Twenty gradients that no operator of `_OUT` makes."""
    return tuple(gradient(torch.sin(x[:, : number + 1]), f"p{number}") for number in range(20))


@pytest.mark.parametrize("on_gpu", [False, True])
def test_many_small_parts_are_copied_by_a_list_on_a_gpu(on_gpu: bool, monkeypatch):
    monkeypatch.setattr("wholestep.passes.comm.grads_as_bucket_views._on_gpu", lambda node: on_gpu)
    x = torch.randn(3, 20)
    _, after = filled(many, [x])
    assert builders.count(after, aten.cat.default) == (not on_gpu)
    (copies,) = after.graph.find_nodes(op="call_function", target=aten._foreach_copy_.default) or [None]
    assert (copies is not None) == on_gpu
    assert copies is None or len(copies.args[0]) == 20


def test_a_gradient_that_is_read_afterwards_stays_where_it_is():
    """The reduction would change it under its reader."""

    def fn(x, y):
        weight, bias = y.t() @ x, y.sum(0)
        reduced = gradient(weight, "weight"), gradient(bias, "bias")
        return *reduced, weight * 2, bias * 2

    _, after = filled(fn, [X, Y])
    assert builders.count(after, aten.cat.default) == 1
    assert builders.count(after, aten.mm.out) == 0


def test_a_gradient_that_is_transposed_lies_in_its_own_order():
    def fn(x, y):
        return gradient((x.t() @ y).t(), "weight"), gradient(y.sum(0), "bias")

    _, after = filled(fn, [X, Y])
    assert builders.count(after, aten.mm.out) == 1
    assert builders.count(after, aten.cat.default) == 0


def test_a_gradient_that_is_summed_up_is_summed_up_in_its_place():
    """Two backward passes: what the first one makes is added to."""

    def fn(x, y):
        forward = x.repeat(9, 9).sum()  # where the peak is
        weight = y.t() @ x
        weight = weight + y.t() @ (x * 2)
        return gradient(weight, "weight"), gradient(y.sum(0), "bias"), forward

    _, after = filled(fn, [X, Y])
    assert builders.count(after, aten.mm.out) == 1
    assert builders.count(after, aten.cat.default) == 0


def test_the_same_gradient_twice_is_copied_once():
    def fn(x, y):
        weight = y.t() @ x
        return gradient(weight, "a"), gradient(weight.view(-1), "b")

    filled(fn, [X, Y])


def test_the_peak_stays():
    """Two gradients with a large value between them: the bucket would be alive beside it, half of it for nothing."""

    def fn(x, y):
        weight = y.t() @ x
        between = x.repeat(40, 1)
        bias = (between.t() @ between).sum(0)
        return gradient(weight, "weight"), gradient(torch.addmm(y.new_zeros(4, 4), x.t(), x) + bias, "other")

    x, y = torch.randn(6, 4), torch.randn(6, 3)
    before, after = filled(fn, [x, y])
    peaks = [max(live_bytes(program).values()) for program in (before, after)]
    assert peaks[1] <= peaks[0]
    assert builders.count(after, aten.mm.out) == 0


def test_other_cats_are_left_alone():
    def fn(x, y):
        return torch.cat([y.t() @ x, y.t() @ x * 2]), gradient(y.sum(0), "bias")

    _, after = filled(fn, [X, Y])
    assert builders.count(after, aten.cat.default) == 1
