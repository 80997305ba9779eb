"""Work of a node: formulas against hand-computed cases, and against torch's own counts where it has some."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from tests.unit import builders
from wholestep.capture.functionalize.functionalize import functional_twin
from wholestep.cost.flops import Kind, Work, attention_flops, base_name, num_listed, works
from wholestep.ir import op_info
from wholestep.passes.rewrites.fuse_gelu import PRODUCT_GELU, PRODUCT_GELU_BACKWARD

aten = torch.ops.aten


def all_works(fn: Callable[..., Any], *tensors: torch.Tensor) -> list[Work]:
    program = builders.capture(fn, tensors)
    return [work for node in program.graph.nodes for work in works(node)]


def busy(fn: Callable[..., Any], *tensors: torch.Tensor) -> list[Work]:
    return [work for work in all_works(fn, *tensors) if work.kind not in (Kind.VIEW, Kind.NUMBER)]


def only(fn: Callable[..., Any], *tensors: torch.Tensor) -> Work:
    (work,) = busy(fn, *tensors)
    return work


def test_a_product() -> None:
    work = only(torch.mm, torch.ones(3, 5), torch.ones(5, 7))
    assert work == Work(kind=Kind.MATMUL, amount=2 * 3 * 5 * 7, num_bytes=4 * (15 + 35 + 21), dtype=torch.float32)


def test_a_product_with_a_bias_and_one_of_batches() -> None:
    a, b = torch.ones(3, 5, dtype=torch.bfloat16), torch.ones(5, 7, dtype=torch.bfloat16)
    work = only(torch.addmm, torch.ones(7, dtype=torch.bfloat16), a, b)
    assert (work.amount, work.num_bytes, work.dtype) == (210, 2 * (7 + 15 + 35 + 21), torch.bfloat16)
    assert only(torch.bmm, torch.ones(2, 3, 5), torch.ones(2, 5, 7)).amount == 2 * 210


def test_a_product_with_an_activation_takes_what_the_product_takes() -> None:
    def step(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden, pre = PRODUCT_GELU(bias, a, b)
        return hidden, pre, PRODUCT_GELU_BACKWARD(a, b, pre)

    bias, a, b = (torch.ones(shape, dtype=torch.bfloat16) for shape in ((7,), (3, 5), (5, 7)))
    forward, backward = busy(step, bias, a, b)
    product = Work(kind=Kind.MATMUL, amount=2 * 3 * 5 * 7, dtype=torch.bfloat16)
    assert forward == replace(product, num_bytes=2 * (7 + 15 + 35 + 21 + 21))
    assert backward == replace(product, num_bytes=2 * (15 + 35 + 21 + 21))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_count_what_torch_counts(transposed: bool, groups: int) -> None:
    convolution = F.conv_transpose2d if transposed else F.conv2d
    weight = torch.ones((32, 64 // groups, 3, 3) if transposed else (64, 32 // groups, 3, 3))
    data = torch.ones(5, 32, 8, 8)

    def step(data: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        data, weight = (one.detach().requires_grad_() for one in (data, weight))
        out = convolution(data, weight, stride=2, groups=groups)
        return torch.autograd.grad(out.sum(), (data, weight))

    with FlopCounterMode(display=False) as counted:
        convolution(data, weight, stride=2, groups=groups)
    forward = counted.get_total_flops()  # of the gradients torch counts too much where there are groups
    found = [(work.kind, work.amount) for work in all_works(step, data, weight) if work.dtype]
    assert found == [(Kind.CONVOLUTION, forward), (Kind.CONVOLUTION_BACKWARD, 2 * forward)]


def test_channels_of_convolutions_count_in_whole_blocks() -> None:
    def flops(into: int, out: int, groups: int = 1) -> float:
        data, weight = torch.ones(2, into, 8, 8), torch.ones(out, into // groups, 1, 1)
        return only(partial(F.conv2d, groups=groups), data, weight).amount

    assert flops(3, 16) == flops(16, 3) == flops(16, 16) == 2 * 2 * 64 * 16 * 16
    assert flops(17, 16) == 2 * flops(16, 16)
    assert flops(32, 32, groups=32) == 2 * flops(16, 16)  # each channel alone


def test_lists_are_counted_by_the_longest() -> None:
    program = builders.capture(lambda x, y: [*x.split(1), torch.cat([x, y, x])], [torch.ones(4), torch.ones(4)])
    found = {node.name: num_listed(node) for node in program.graph.nodes if node.op == "call_function"}
    assert found == {"split": 4, "getitem": 0, "getitem_1": 0, "getitem_2": 0, "getitem_3": 0, "cat": 3}


def test_attention_counts_products_and_a_mask_halves_them() -> None:
    query, key = (2, 3, 16, 8), (2, 3, 32, 8)
    pairs = 2 * 3 * 16 * 32
    assert attention_flops(query, key, key, causal=False, backward=False) == 2 * pairs * 16
    assert attention_flops(query, key, key, causal=False, backward=True) == 2 * pairs * 40
    assert attention_flops(query, key, key, causal=True, backward=True) == pairs * 40

    def step(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(F.scaled_dot_product_attention(x, x, x, is_causal=True).sum(), x)[0]

    found = {work.kind: work.amount for work in all_works(step, torch.randn(query)) if work.dtype}
    assert found == {
        Kind.ATTENTION: attention_flops(query, query, query, causal=True, backward=False),
        Kind.ATTENTION_BACKWARD: attention_flops(query, query, query, causal=True, backward=True),
    }


def test_elementwise_operators_move_bytes_each_tensor_once() -> None:
    x, y = torch.ones(4, 8), torch.ones(8)
    assert only(torch.add, x, y) == Work(kind=Kind.POINTWISE, amount=4 * 72, num_bytes=4 * 72)
    assert only(lambda x: x * x, x).num_bytes == 4 * 64
    assert only(lambda x, y: x + y.expand(4, 8), x, y).num_bytes == 4 * 72
    assert only(torch.tanh, x) == Work(kind=Kind.FUNCTION, amount=32, num_bytes=4 * 64)
    assert only(torch.tanh, x.bfloat16()) == Work(kind=Kind.FUNCTION, amount=16, num_bytes=2 * 64)
    assert only(lambda x: x.sum(0), x) == Work(kind=Kind.REDUCTION, amount=4 * 40, num_bytes=4 * 40)
    assert only(lambda x: x.softmax(1), x).kind is Kind.SOFTMAX
    assert only(lambda x: F.layer_norm(x, (8,)), x).kind is Kind.NORM


def test_an_operator_in_place_reads_and_writes_its_argument_and_a_copy_only_writes_it() -> None:
    program = builders.capture(lambda x, y: (x + 1, y + 1), [torch.ones(8), torch.ones(8)])
    x, y = program.graph.find_nodes(op="placeholder")
    with program.graph.inserting_before(program.graph.output_node()):
        multiplied = program.graph.call_function(aten.mul_.Tensor, (x, y))
        copied = program.graph.call_function(aten.copy_.default, (x, y))
        listed = program.graph.call_function(aten._foreach_copy_.default, ([x, y], [y, x]))
    assert works(multiplied) == (Work(kind=Kind.IN_PLACE, amount=96, num_bytes=96),)
    assert works(copied) == (Work(kind=Kind.IN_PLACE, amount=64, num_bytes=64),)
    assert works(listed) == works(copied) * 2


def test_rows_of_a_table_are_read_and_not_the_table() -> None:
    table, index = torch.ones(1000, 8), torch.zeros(3, dtype=torch.int64)
    assert only(lambda table, index: F.embedding(index, table), table, index).num_bytes == 2 * 4 * 24 + 8 * 3


def test_lists_give_one_kernel_per_index() -> None:
    tensors = [torch.ones(4), torch.ones(6), torch.ones(4), torch.ones(6)]
    found = busy(lambda a, b, c, d: tuple(torch._foreach_add([a, b], [c, d])), *tensors)
    assert [work.num_bytes for work in found] == [3 * 16, 3 * 24]


def test_a_fused_optimizer_moves_what_its_lists_hold() -> None:
    def update(*state: torch.Tensor) -> None:
        parameter, grad, average, square, step = ([one] for one in state)
        options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
        aten._fused_adamw_(parameter, grad, average, square, [], step, **options, amsgrad=False, maximize=False)

    found = busy(update, *(torch.ones(100) for _ in range(4)), torch.ones(()))
    fused = max(found, key=lambda work: work.num_bytes)
    assert 4 * 100 * (4 + 3) <= fused.num_bytes <= 4 * 100 * (4 + 4) + 8


def test_views_and_numbers_ask_nothing_of_the_device() -> None:
    found = all_works(lambda x: x.t().reshape(4, 8).unsqueeze(0), torch.ones(4, 8))
    assert sorted(work.kind for work in found) == sorted([Kind.POINTWISE] + [Kind.VIEW] * (len(found) - 1))
    assert len(found) > 2
    assert [work.kind for work in all_works(lambda x: x.split(2), torch.ones(4))] == [Kind.VIEW] + [Kind.NUMBER] * 2


def test_collectives_and_waits_are_no_work_of_the_device() -> None:
    group = builders.world_group()
    program = builders.capture(lambda x: op_info.GRADIENT(x * 2, "w"), [torch.ones(4)])
    placed = builders.place(program, group=group)
    found = [node for node in placed.graph.nodes if op_info.is_collective(node) or node.target is op_info.WAIT]
    assert len(found) == 2
    assert [works(node) for node in found] == [(), ()]


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (aten.add_.Tensor, "add"),
        (aten._foreach_mul_.ScalarList, "_foreach_mul"),
        (functional_twin(aten.native_batch_norm.default, (3, 4)), "native_batch_norm"),
        (functional_twin(aten._fused_adamw_.tensor_lr, (0, 2)), "_fused_adamw"),
    ],
    ids=str,
)
def test_names_of_operators(op: Any, name: str) -> None:
    assert base_name(op) == name
