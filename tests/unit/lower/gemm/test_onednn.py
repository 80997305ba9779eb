"""Products by oneDNN: the numbers, whatever operands lie like, and what happens where it cannot be called."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.unit.lower.gemm.processor import IS_SERVED, NEEDS_ONEDNN
from wholestep.lower.gemm import onednn

TERMS = 37
BOUND = TERMS * 2.0**-24
"""Of a sum of so many products of float32 numbers, relative to that of their magnitudes."""

LAYOUTS = {
    "rows": lambda rows, columns: torch.randn(rows, columns),
    "columns": lambda rows, columns: torch.randn(columns, rows).t(),
    "rows apart": lambda rows, columns: torch.randn(rows, columns + 3)[:, :columns],
    "columns apart": lambda rows, columns: torch.randn(columns, rows + 5).t()[:rows],
    "every second": lambda rows, columns: torch.randn(2 * rows, 2 * columns)[::2, ::2],
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.manual_seed(0)
    onednn._opened.cache_clear()
    yield
    onednn._opened.cache_clear()


def assert_is_product(found: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None) -> None:
    exact, reach = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    if bias is not None:
        exact, reach = exact + bias.double(), reach + bias.double().abs()
    assert bool(((found.double() - exact).abs() <= BOUND * reach).all())


def test_it_can_be_called_with_every_torch_that_is_supported():
    assert onednn.why_not() == "" if IS_SERVED else "needs the cpu support" in onednn.why_not()


@pytest.mark.parametrize("a_lies", LAYOUTS)
@pytest.mark.parametrize("b_lies", LAYOUTS)
def test_two_matrices(a_lies, b_lies):
    a, b = LAYOUTS[a_lies](19, TERMS), LAYOUTS[b_lies](TERMS, 23)
    out = torch.full((19, 23), float("nan"))
    assert torch.ops.wholestep.product.out(a, b, out=out) is out
    assert_is_product(out, a, b)
    assert_is_product(torch.ops.wholestep.product(a, b), a, b)


def test_a_result_that_lies_by_columns():
    a, b, out = torch.randn(19, TERMS), torch.randn(TERMS, 23), torch.full((23, 19), float("nan")).t()
    torch.ops.wholestep.product.out(a, b, out=out)
    assert_is_product(out, a, b)


def test_batches():
    a, b = torch.randn(5, 19, TERMS), torch.randn(5, 23, TERMS).transpose(1, 2)
    out = torch.full((5, 19, 23), float("nan"))
    torch.ops.wholestep.product.out(a, b, out=out)
    assert_is_product(out, a, b)


@pytest.mark.parametrize("shape", [(23,), (1, 23), (19, 1), (19, 23)], ids=str)
def test_a_bias_of_any_shape_that_fits(shape):
    a, b, bias = torch.randn(19, TERMS), torch.randn(23, TERMS).t(), torch.randn(shape)
    out = torch.full((19, 23), float("nan"))
    torch.ops.wholestep.product_add.out(bias, a, b, out=out)
    assert_is_product(out, a, b, bias)
    assert_is_product(torch.ops.wholestep.product_add(bias, a, b), a, b, bias)


def test_described_as_it_is():
    with FakeTensorMode():
        a, b = torch.empty(5, 19, TERMS), torch.empty(5, TERMS, 23)
        found = torch.ops.wholestep.product(a, b), torch.ops.wholestep.product_add(torch.empty(23), a[0], b[0])
    assert [tuple(one.shape) for one in found] == [(5, 19, 23), (19, 23)]
    assert all(one.is_contiguous() and one.dtype is torch.float32 for one in found)


@NEEDS_ONEDNN
def test_what_it_refuses_is_an_error_with_shapes_and_not_the_end_of_the_process():
    with pytest.raises(RuntimeError, match=r"product of \[3, 4\] by \[5, 6\] into \[3, 6\]"):
        onednn.product(torch.ones(3, 4), torch.ones(5, 6), out=torch.ones(3, 6))


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (lambda: (_ for _ in ()).throw(OSError("undefined symbol: mkldnn_matmul\nmore")), "OSError: undefined symbol"),
        (lambda: lambda *given: None, "other numbers"),
        (lambda: lambda *given: b"no such kernel", "no such kernel"),
    ],
    ids=["not built", "writes nothing", "refuses"],
)
def test_where_it_cannot_be_called_torch_multiplies_and_says_so_once(monkeypatch, caplog, broken, said):
    monkeypatch.setattr(onednn, "_built", broken)
    monkeypatch.setattr(onednn, "why_not", onednn.why_not.__wrapped__)
    assert said in onednn.why_not()
    assert "\n" not in onednn.why_not()
    assert onednn.replacements() == {}
    a, b, bias = torch.randn(19, TERMS), torch.randn(TERMS, 23), torch.randn(23)
    with caplog.at_level(logging.WARNING, "wholestep"):
        found: list[Any] = [torch.ops.wholestep.product(a, b) for _ in range(3)]
        found.append(torch.ops.wholestep.product_add(bias, a, b))
    assert torch.equal(found[0], a @ b)
    assert torch.equal(found[-1], torch.addmm(bias, a, b))
    assert [said in record.message for record in caplog.records] == [True]
