"""What a compiler is taken to make of a segment: kernels, what each reads and writes, and its time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor
from torch.nn import functional as F

from tests.unit import builders
from wholestep.cost import default_ceilings
from wholestep.cost.cost_model import CostModel
from wholestep.cost.device_model import Device
from wholestep.cost.flops import Kind, Work, works
from wholestep.cost.fusion_model import kernels
from wholestep.ir import op_info
from wholestep.ir.segment import Segment
from wholestep.lower.inductor import segment_compiler
from wholestep.passes.schedule.form_segments import form_segments

H200, CPU = CostModel.default("h200+nvlink"), CostModel.default("cpu+gloo")


def segment_of(fn: Callable[..., Any], *tensors: Tensor, stored: tuple[tuple[int, int], ...] = ()) -> fx.Node:
    """A call of `fn` as one segment."""
    module = builders.capture(fn, tensors).module
    graph = fx.Graph()
    given = [graph.placeholder(f"x{number}") for number in range(len(tensors))]
    return graph.call_function(Segment(name="segment", read=cache(lambda: module), stored=stored), (given,))


def found(fn: Callable[..., Any], *tensors: Tensor, stored: tuple[tuple[int, int], ...] = ()) -> list[Work]:
    return [one for one in kernels(segment_of(fn, *tensors, stored=stored)) if one.kind is not Kind.VIEW]


def of_memory(num_bytes: int, kind: Kind = Kind.POINTWISE) -> Work:
    return Work(kind=kind, amount=num_bytes, num_bytes=num_bytes)


def test_what_leads_from_one_node_to_the_next_does_not_travel() -> None:
    assert found(lambda x, y: (x + y) * y - x, torch.ones(8), torch.ones(8)) == [of_memory(3 * 32)]
    # Two of them read it, one of them through a view; and it is a result besides.
    shared = found(lambda x: (y := x + 1, y * 2, y.view(2, 4).sum(0)), torch.ones(8))
    assert shared == [of_memory(3 * 32 + 16)]


def test_values_that_have_nothing_to_do_with_each_other_are_kernels_of_their_own() -> None:
    assert found(lambda x, y: (x + 1, y * 2), torch.ones(8), torch.ones(4)) == [of_memory(64), of_memory(32)]
    # Two runs of nodes that a third one joins.
    assert found(lambda x, y: (x + 1) * (y * 2), torch.ones(8), torch.ones(8)) == [of_memory(96)]


def test_a_library_stays_one_and_stands_between_kernels() -> None:
    def block(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh((x + 1) @ w) * 2 + x

    made = found(block, torch.ones(4, 4), torch.ones(4, 4))
    product = Work(kind=Kind.MATMUL, amount=128, num_bytes=192, dtype=torch.float32)
    behind = Work(kind=Kind.POINTWISE, amount=192, num_bytes=192, within=(Work(kind=Kind.FUNCTION, amount=16),))
    assert made == [product, of_memory(128), behind]


def test_a_value_in_front_of_a_library_is_read_again_behind_it() -> None:
    """The residual stream: written by one kernel, read by the next one, which cannot be the same."""

    def residual(x: Tensor, w: Tensor) -> Tensor:
        x = x * 2
        return x + x @ w

    made = found(residual, torch.ones(4, 4), torch.ones(4, 4))
    assert [one.num_bytes for one in made if one.kind is Kind.POINTWISE] == [128, 192]


def test_results_that_overwrite_an_argument_are_an_update() -> None:
    def update(weight: Tensor, grad: Tensor) -> Tensor:
        return weight - grad * 0.1

    weights = torch.ones(8), torch.ones(8)
    assert found(update, *weights, stored=((0, 0),)) == [of_memory(96, Kind.IN_PLACE)]
    assert found(update, *weights) == [of_memory(96)]


def test_rows_of_a_table_are_read_and_not_the_table() -> None:
    def embed(table: Tensor, index: Tensor) -> Tensor:
        return F.embedding(index, table) * 2

    assert found(embed, torch.ones(1000, 8), torch.zeros(3, dtype=torch.int64)) == [of_memory(2 * 96 + 24)]


def test_constants_are_no_memory() -> None:
    assert found(lambda x: x * torch.full((8,), 2.0), torch.ones(8)) == [of_memory(64)]


def test_a_kernel_takes_as_long_as_its_memory_or_all_of_its_arithmetic() -> None:
    """And has one floor."""
    gpu = default_ceilings.DEVICES["h200"]
    cpu = default_ceilings.DEVICES["cpu"]
    plain = of_memory(1 << 20)
    tanh = Work(kind=Kind.FUNCTION, amount=1 << 17)
    busy = Work(kind=Kind.POINTWISE, amount=1 << 20, num_bytes=1 << 20, within=(tanh, tanh))
    assert gpu.kernel_us(busy) == gpu.kernel_us(plain)
    assert cpu.kernel_us(plain) < cpu.kernel_us(busy) == pytest.approx(2 * cpu.curves["function"].us(1 << 17))
    little = Work(kind=Kind.POINTWISE, amount=1 << 20, num_bytes=1 << 20, within=(Work(kind=Kind.FUNCTION, amount=1),))
    assert cpu.kernel_us(little) == cpu.kernel_us(plain)


def test_kernels_of_a_segment_take_their_own_times() -> None:
    """They are no list, which a GPU takes as one kernel: work of a product is FLOPs, and that of others bytes."""

    def block(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).relu() + x

    node = segment_of(block, torch.ones(4096, 4096), torch.ones(4096, 4096))
    product, rest = kernels(node)
    assert H200.node_us(node) == pytest.approx(H200.device.kernel_us(product) + H200.device.kernel_us(rest))
    assert H200.host_us(node) == 2 * H200.device.calls_us["pointwise"]


def slow_host() -> CostModel:
    curves = default_ceilings.DEVICES["cpu"].curves
    calls_us = {"pointwise": 1e3, "matmul": 1e4, "view": 1e6, "number": 1e6}
    device = Device(curves=curves, calls_us=calls_us, us_per_listed_tensor=1e6, host_is_device=True)
    return CostModel(source="a test", device=device, links=default_ceilings.LINKS["gloo"])


def test_on_a_cpu_a_call_is_paid_for_each_kernel() -> None:
    """Not for views, nor for the arguments of the segment."""
    node = segment_of(lambda x, w: (x.t() @ w).relu() * 2, torch.ones(4, 4), torch.ones(4, 4))
    assert slow_host().node_us(node) == pytest.approx(1.1e4, rel=0.01)


def test_a_segment_is_never_slower_than_its_nodes() -> None:
    def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        hidden = F.gelu(F.linear(F.layer_norm(x * 2, (64,)), w, b))
        return x + F.linear(hidden, w.t())

    tensors = torch.randn(512, 64), torch.randn(256, 64), torch.randn(256)
    node = segment_of(layer, *tensors)
    apart = builders.capture(layer, tensors).graph.nodes
    for cost in (H200, CPU):
        assert 0 < cost.node_us(node) < sum(map(cost.node_us, apart))


def test_other_nodes_have_the_kernels_that_they_have() -> None:
    program = builders.capture(lambda x: (x + 1).t().relu(), [torch.ones(2, 2)])
    for node in program.graph.nodes:
        assert kernels(node) == works(node)


def test_items_of_a_list_are_values_of_their_own_and_views_of_one_are_not() -> None:
    def items(x: Tensor) -> Tensor:
        first, second = x.split(8)
        return first + second

    def views(x: Tensor) -> Tensor:
        return x.t() + x

    assert found(items, torch.ones(16)) == [of_memory(96)]
    assert found(views, torch.ones(4, 4)) == [of_memory(128)]


def planned(
    fn: Callable[..., Any], *tensors: Tensor, without: str = "none"
) -> tuple[dict[str, float], dict[str, float]]:
    """Times of the nodes of a program, as they are and where a compiler may have all but those of one name."""
    nodes = list(builders.capture(fn, tensors).graph.nodes)
    compiled = replace(CPU, compiles=lambda node: without not in str(node.target))
    return [{node.name: us for node, us in cost.times_us(nodes).items()} for cost in (CPU, compiled)]


def test_nodes_that_will_be_a_kernel_share_its_time_in_a_plan() -> None:
    def block(x: Tensor, w: Tensor) -> Tensor:
        return ((x @ w).t() + 1) * 2

    tensors = torch.ones(256, 256), torch.ones(256, 256)
    apart, together = planned(block, *tensors)
    kernel = of_memory(2 * 4 * 256 * 256)
    call_us = CPU.device.calls_us["pointwise"]
    assert together["mm"] == apart["mm"]
    assert (apart["t"], together["t"]) == (CPU.device.calls_us["view"], 0)
    assert together["add"] + together["mul"] == pytest.approx(CPU.device.kernel_us(kernel) + call_us)
    assert together["add"] == together["mul"] < apart["add"]
    # Nor does it take longer than apart: the floor of one kernel is none of a node that stays alone.
    assert planned(lambda x: x + 1, torch.ones(2))[1] == planned(lambda x: x + 1, torch.ones(2))[0]


def test_what_the_compiler_may_not_have_is_planned_as_it_is() -> None:
    apart, together = planned(lambda x: (x + 1) * 2, torch.ones(8), without="aten.mul")
    assert together == apart


def test_a_plan_takes_as_long_as_the_segments_it_becomes() -> None:
    """Of a step with everything: the times of its nodes and of the segments that are made of them agree."""
    program = builders.place(builders.capture(training_step, PARAMETERS), group=builders.world_group())
    nodes = list(program.graph.nodes)
    apart_us, plan_us = (
        sum(cost.times_us(nodes).values()) for cost in (H200, replace(H200, compiles=segment_compiler.may_compile))
    )
    segments = form_segments(program, compiles=segment_compiler.compiles)
    assert any(isinstance(node.target, Segment) for node in segments.graph.nodes)
    made_us = sum(H200.times_us(list(segments.graph.nodes)).values())
    assert plan_us == pytest.approx(made_us, rel=0.15)
    assert made_us < 0.7 * apart_us


PARAMETERS = [torch.ones(64, 64) for _ in range(4)]


def training_step(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Layers, a loss, gradients that are reduced, and an update."""
    held = [weight.detach().requires_grad_() for weight in weights]
    for weight in held:
        x = F.layer_norm(F.gelu(x @ weight) + x, (64,))
    grads = torch.autograd.grad(F.mse_loss(x, torch.zeros_like(x)), held)
    return tuple(
        weight - 0.1 * op_info.GRADIENT(grad, str(number)) * 2
        for number, (weight, grad) in enumerate(zip(weights, grads, strict=True))
    )
