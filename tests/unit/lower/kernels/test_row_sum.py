"""Sums over the rows of matrices: which of a segment are taken, and the kernels, run by Triton's interpreter."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.unit.lower import triton_interpreter
from wholestep.lower.kernels import row_sum

aten = torch.ops.aten
HALF = torch.bfloat16


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter = triton_interpreter.prepare(monkeypatch)
    for name in ("_add_rows", "_add_parts"):
        kernel = interpreter.InterpretedFunction(getattr(row_sum, name))
        monkeypatch.setattr(row_sum, f"{name.replace('_add', '')}_kernel", kernel)


@pytest.mark.parametrize(
    ("rows", "columns"), [(300, (7,)), (1024, (96, 32, 200)), (257, (1, 64, 33)), (4096, (65, 8)), (8200, (40,))]
)
@pytest.mark.parametrize(("dtype", "result"), [(torch.float16, torch.float32), (torch.float32, torch.float32)])
def test_sums_are_exact_where_they_can_be(
    rows: int, columns: tuple[int, ...], dtype: torch.dtype, result: torch.dtype, interpreted: None
) -> None:
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randint(-3, 4, (rows, size), generator=generator).to(dtype) for size in columns]
    found = row_sum.sum_rows(matrices, rows, columns, dtype, result)
    for matrix, one in zip(matrices, found, strict=True):
        assert one.dtype is result
        assert torch.equal(one, matrix.double().sum(0).to(dtype).to(result))


def test_a_sum_is_rounded_to_the_type_of_the_matrix(interpreted: None) -> None:
    matrix = torch.ones(4097, 1).half()  # above 2,048 there are even numbers alone in that type
    assert row_sum.sum_rows([matrix], 4097, [1], torch.float16, torch.float32)[0].item() == 4096


@pytest.mark.parametrize("rows", [256, 1000, 1024, 4095, 4096, 8192, 100_000, 1 << 24])
@pytest.mark.parametrize("columns", [(1,), (768, 3072), (50304,), (64,) * 8])
def test_parts_hold_every_row_once(rows: int, columns: tuple[int, ...]) -> None:
    layout = row_sum._Layout(rows, columns)
    assert layout.num_parts <= row_sum._MOST_PARTS
    assert (layout.num_parts - 1) * layout.share < rows <= layout.num_parts * layout.share
    assert layout.share % layout.cut.block[0] == 0


def traced(fn: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = HALF) -> fx.GraphModule:
    """A graph of ATen's operators, whose tensors count as those of a GPU."""
    with FakeTensorMode():
        inputs = [torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes]
        return make_fx(fn, tracing_mode="fake")(*inputs)


@pytest.fixture(autouse=True)
def taken_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    if row_sum.triton is None:
        monkeypatch.setattr(row_sum, "triton", operator)


def calls(graph: fx.Graph) -> list[fx.Node]:
    return graph.find_nodes(op="call_function", target=row_sum.SUM_ROWS)


def bias_gradient(grad: Tensor) -> Tensor:
    """As autograd makes it under autocast."""
    summed = aten.sum.dim_IntList(grad, [0], True)
    return torch.ops.prims.convert_element_type(aten.view(summed, [grad.shape[1]]), torch.float32)


def test_one_call_makes_all_sums_of_a_kind() -> None:
    def backward(a: Tensor, b: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        hidden = aten.mm(aten.mul(a, 2), w)
        grad = aten.mul(b, hidden)
        return aten.mm(grad, w), bias_gradient(a), bias_gradient(grad), aten.sum.dim_IntList(b, [0], True)

    made = traced(backward, (512, 64), (512, 64), (64, 64))
    assert row_sum.gather_sums(made.graph) == 3
    made.graph.lint()
    assert sorted(str(call.args[4]) for call in calls(made.graph)) == ["torch.bfloat16", "torch.float32"]
    (of_two,) = [call for call in calls(made.graph) if call.args[4] is torch.float32]
    assert of_two.args[1:] == (512, [64, 64], HALF, torch.float32)
    assert not made.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    found = [node.meta["val"] for node in made.graph.output_node().args[0]]  # type: ignore[union-attr]
    assert [(tuple(one.shape), one.dtype) for one in found] == [
        ((512, 64), HALF), ((64,), torch.float32), ((64,), torch.float32), ((1, 64), HALF),
    ]  # fmt: skip


def rows_that_are_few(a: Tensor) -> Tensor:
    return bias_gradient(a)


def of_a_matrix_that_nobody_stores(a: Tensor) -> Tensor:
    return bias_gradient(aten.mul(a, a))


def over_columns(a: Tensor) -> Tensor:
    return aten.sum.dim_IntList(a, [1], True)


def over_all(a: Tensor) -> Tensor:
    return aten.sum.dim_IntList(a, None, True)


def that_the_segment_reads(a: Tensor) -> Tensor:
    return aten.mul(aten.sum.dim_IntList(a, [0], True), 2)


def in_a_type_of_its_own(a: Tensor) -> Tensor:
    return aten.sum.dim_IntList(a, [0], dtype=torch.float32)


def of_a_transposed_matrix(a: Tensor) -> Tensor:
    return bias_gradient(aten.permute(a, [1, 0]))


@pytest.mark.parametrize(
    ("fn", "rows"),
    [
        (rows_that_are_few, 255), (of_a_matrix_that_nobody_stores, 512), (over_columns, 512), (over_all, 512),
        (that_the_segment_reads, 512), (of_a_transposed_matrix, 512), (in_a_type_of_its_own, 512),
    ],
)  # fmt: skip
def test_other_sums_are_left_to_inductor(fn: Callable[[Tensor], Tensor], rows: int) -> None:
    made = traced(fn, (rows, 512))
    before = str(made.graph)
    assert row_sum.gather_sums(made.graph) == 0
    assert str(made.graph) == before
    assert row_sum.gather_sums(traced(rows_that_are_few, (512, 512)).graph) == 1


def test_many_sums_are_several_calls_each_behind_the_last_of_its_own() -> None:
    """So that a long segment does not hold all that it sums up until its end."""

    def backward(*grads: Tensor) -> list[Tensor]:
        doubled = [aten.mm(grad, grad) for grad in grads]
        return [one for grad in doubled for one in (aten.mm(grad, grad), bias_gradient(grad))]

    made = traced(backward, *[(512, 512)] * 11)
    assert row_sum.gather_sums(made.graph) == 11
    made.graph.lint()
    first, second = calls(made.graph)
    assert [len(call.args[0]) for call in (first, second)] == [8, 3]
    products = made.graph.find_nodes(op="call_function", target=aten.mm.default)
    assert [sum(product < call for product in products[11:]) for call in (first, second)] == [8, 11]


def test_whole_numbers_and_cpus_are_left() -> None:
    assert row_sum.gather_sums(traced(rows_that_are_few, (512, 8), dtype=torch.float64).graph) == 0
    made = make_fx(rows_that_are_few, tracing_mode="fake")(torch.zeros(512, 8, dtype=HALF))
    assert row_sum.gather_sums(made.graph) == 0


def test_what_inductor_writes_is_found() -> None:
    text = (
        "buf2 = torch.ops.wholestep.sum_rows.default([reinterpret_tensor(arg0_1, (1024, 768), (768, 1), 0), buf1], "
        "1024, [768, 3072], torch.bfloat16, torch.float32)"
    )
    assert row_sum._CALL.findall(text) == [("1024", "768, 3072", "torch.bfloat16", "torch.float32")]


def test_a_program_reads_vectors() -> None:
    """Compiled for a GPU that need not be here."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    places = [(0, 0), (0, 1), (1,), (2, 0), (2, 1), (2, 2), (3, 0), (3, 1)]
    for cut in (row_sum._FEW_ROWS, row_sum._MANY_ROWS):
        source = triton.compiler.ASTSource(
            fn=row_sum._rows_kernel,
            signature={
                "matrices": ("*bf16",) * 2, "parts": "*fp32", "size": ("i32",) * 3, "columns": ("i32",) * 2,
                "block": "constexpr",
            },
            constexprs={(4,): cut.block}, attrs={place: [["tt.divisibility", 16]] for place in places},
        )  # fmt: skip
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": cut.warps})
        height, width = cut.block
        assert len(re.findall(r"ld\.global\.v4\.b32", made.asm["ptx"])) == height * width // (32 * cut.warps * 8)
