"""Which algorithm a product gets, and how cublasLt is asked: without a GPU. With one:
`tests/gpu/kernels/test_matmul_autotune.py`."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from wholestep.lower.gemm import cublaslt, matmul_autotune
from wholestep.lower.gemm.cublaslt import Algorithm, Epilogue, Factor, Product
from wholestep.util.log_once import log_once

FIRST, SECOND = Algorithm(b"1" * 64, 0), Algorithm(b"2" * 64, 32)


def asked(epilogue: Epilogue = Epilogue.NOTHING) -> Product:
    plain = Factor(by_columns=False, stride=4, alignment_bytes=16)
    return Product(
        rows=4, columns=4, inner=4, a=plain, b=plain, out=plain, type=torch.bfloat16, out_type=torch.bfloat16,
        epilogue=epilogue,
    )  # fmt: skip


class Call:
    """In the place of cublasLt: notes what it runs, and writes a number per algorithm."""

    def __init__(self, known: list[Algorithm]) -> None:
        self.known, self.extras, self.runs = known, dict[str, Any](), list[Algorithm]()

    def set_epilogue(self, **extras: Any) -> None:
        self.extras = extras

    def algorithms(self, limit: int) -> list[Algorithm]:
        return self.known[:limit]

    def run(self, algorithm: Algorithm, a: Tensor, b: Tensor, out: Tensor) -> None:
        if algorithm is SECOND and self.extras.get("refuses"):
            raise RuntimeError("no")
        self.runs.append(algorithm)
        out.fill_(float(algorithm.data[:1]))


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> dict[Product, Algorithm | None]:
    """What is chosen in the test."""
    made: dict[Product, Algorithm | None] = {}
    monkeypatch.setattr(matmul_autotune, "_chosen", made)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    log_once.cache_clear()
    return made


def product_by(call: Any, times: list[float], monkeypatch: pytest.MonkeyPatch) -> float:
    """The number that a product writes where runs take such times: 0 by torch."""

    def measured(runs: list[Callable[[], object]]) -> list[float]:
        assert len(runs) == len(times)
        return times

    monkeypatch.setattr(matmul_autotune, "_times_ms", measured)
    monkeypatch.setattr(matmul_autotune, "_call_of", lambda product, device: call)
    out = torch.empty(4, 4)
    matmul_autotune._run(asked(), (out, out, out), out.zero_)
    return float(out[0, 0])


@pytest.mark.parametrize(
    ("times", "expected"),
    [([3.0, 2.0, 1.0], 2.0), ([3.0, 1.0, 2.0], 1.0), ([1.0, 2.0, 3.0], 0.0), ([1.0, 0.99, 1.0], 0.0)],
    ids=["the last", "the first", "torch", "hardly faster than torch"],
)
def test_the_fastest_is_taken(
    chosen: dict[Product, Any], times: list[float], expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert product_by(Call([FIRST, SECOND]), times, monkeypatch) == expected
    assert chosen == {asked(): {0.0: None, 1.0: FIRST, 2.0: SECOND}[expected]}
    # Nothing is timed a second time.
    assert product_by(Call([FIRST, SECOND]), [], monkeypatch) == expected


def test_without_the_library_torch_is_asked_and_the_log_says_why_once(
    chosen: dict[Product, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(product: Product, device: torch.device) -> Any:
        raise OSError("libcublasLt.so.13 is not there")

    monkeypatch.setattr(matmul_autotune, "_call_of", missing)
    out = torch.empty(4, 4)
    with caplog.at_level(logging.INFO, logger="wholestep"):
        for epilogue in (Epilogue.NOTHING, Epilogue.BIAS):
            matmul_autotune._run(asked(epilogue), (out, out, out), out.zero_)
    assert not out.any()
    assert [one.getMessage() for one in caplog.records] == [
        "products are left to torch: libcublasLt.so.13 is not there"
    ]


def test_in_a_capture_nothing_is_chosen(chosen: dict[Product, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(matmul_autotune, "_fastest", None)  # whoever times calls it
    out = torch.ones(4, 4)
    matmul_autotune._run(asked(), (out, out, out), out.zero_)
    assert not out.any()
    assert chosen == {}


def test_choices_of_another_library_are_not_used(chosen: dict[Product, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert matmul_autotune.choices() is None
    monkeypatch.setattr(matmul_autotune, "version", lambda: 130_000)
    chosen[asked()] = FIRST
    found = matmul_autotune.choices()
    assert found is not None
    chosen.clear()
    monkeypatch.setattr(matmul_autotune, "version", lambda: 130_001)
    matmul_autotune.load_choices(found)
    assert chosen == {}
    monkeypatch.setattr(matmul_autotune, "version", lambda: 130_000)
    matmul_autotune.load_choices(found)
    assert chosen == {asked(): FIRST}


def test_without_the_library_there_are_no_choices(chosen: dict[Product, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """And a step is saved all the same."""

    def missing() -> int:
        raise OSError("libcublasLt.so.13 is not there")

    monkeypatch.setattr(matmul_autotune, "version", missing)
    chosen[asked()] = None
    assert matmul_autotune.choices() is None
    chosen.clear()
    matmul_autotune.load_choices(matmul_autotune.Choices(version=130_000, algorithms=((asked(), FIRST),)))
    assert chosen == {}


def test_on_a_cpu_it_is_torchs(chosen: dict[Product, Any]) -> None:
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(5, 5, generator=draw).bfloat16() for _ in range(2))
    bias, own = torch.randn(5, generator=draw).bfloat16(), matmul_autotune.Products(torch)
    assert torch.equal(own.mm(a, b, out=torch.empty_like(a)), a @ b)
    assert torch.equal(own.addmm(bias, a, b, alpha=2, out=torch.empty_like(a)), torch.addmm(bias, a, b, alpha=2))
    assert own.bmm is torch.bmm
    assert chosen == {}


def test_how_matrices_lie() -> None:
    base = torch.empty(64, 32)
    assert base.data_ptr() % 64 == 0
    whole = matmul_autotune._factor(base)
    assert whole is not None
    assert (whole.by_columns, whole.stride) == (False, 32)
    assert matmul_autotune._factor(base.t()) == Factor(
        by_columns=True, stride=32, alignment_bytes=whole.alignment_bytes
    )
    assert matmul_autotune._factor(base[:, 3:20]) == Factor(by_columns=False, stride=32, alignment_bytes=4)
    assert matmul_autotune._factor(base[:, ::2]) is None
    assert matmul_autotune._factor(base.expand(64, 32)[:1].expand(64, 32)) is None


class Library:
    """cublasLt on a CPU, in float32, as its documentation has it: matrices by columns, by address and stride."""

    def __init__(self) -> None:
        self.objects: list[dict[str, Any]] = []
        self.workspace_bytes = 0

    def _new(self, made: Any, **held: Any) -> int:
        self.objects.append(held)
        made._obj.value = len(self.objects)
        return 0

    def _of(self, pointer: ctypes.c_void_p) -> dict[str, Any]:
        assert pointer.value
        return self.objects[pointer.value - 1]

    def cublasLtMatmulDescCreate(self, made: Any, compute: int, scale: int) -> int:
        assert (compute, scale) == (68, 0)
        return self._new(made, attributes={})

    def cublasLtMatmulDescSetAttribute(self, description: Any, what: int, value: Any, size: Any) -> int:
        assert size.value == ctypes.sizeof(value._obj)
        self._of(description)["attributes"][what] = value._obj.value
        return 0

    def cublasLtMatrixLayoutCreate(self, made: Any, kind: int, rows: Any, columns: Any, stride: Any) -> int:
        assert kind == 0
        return self._new(made, rows=rows.value, columns=columns.value, stride=stride.value)

    def cublasLtMatmulPreferenceCreate(self, made: Any) -> int:
        return self._new(made, attributes={})

    cublasLtMatmulPreferenceSetAttribute = cublasLtMatmulDescSetAttribute

    def cublasLtMatmulAlgoGetHeuristic(
        self, handle: Any, description: Any, a: Any, b: Any, c: Any, d: Any, preference: Any, limit: int, found: Any,
        count: Any,
    ) -> int:  # fmt: skip
        self.wanted = self._of(preference)["attributes"]
        found._obj[0].workspace_bytes, found._obj[1].status, found._obj[2].workspace_bytes = 256, 1, 512
        count._obj.value = min(limit, 3)
        return 0

    def _matrix(self, address: Any, layout: Any, *, transposed: bool = False) -> Tensor:
        held = self._of(layout)
        assert held["stride"] >= held["rows"]
        count = held["stride"] * (held["columns"] - 1) + held["rows"]
        flat = torch.frombuffer((ctypes.c_float * count).from_address(address.value), dtype=torch.float32)
        matrix = flat.as_strided((held["rows"], held["columns"]), (1, held["stride"]))
        return matrix.t() if transposed else matrix

    def cublasLtMatmul(
        self, handle: Any, description: Any, alpha: Any, a: Any, a_layout: Any, b: Any, b_layout: Any, beta: Any,
        c: Any, c_layout: Any, d: Any, d_layout: Any, algorithm: Any, workspace: Any, workspace_bytes: Any, stream: Any,
    ) -> int:  # fmt: skip
        assert (alpha._obj.value, beta._obj.value) == (1.0, 0.0)
        held = self._of(description)["attributes"]
        first = self._matrix(a, a_layout, transposed=bool(held[3]))
        second = self._matrix(b, b_layout, transposed=bool(held[4]))
        if first.shape[1] != second.shape[0]:
            return 7
        sums = first @ second
        if held[7] & 4:  # a bias per row, as columns see it
            bias = (ctypes.c_float * sums.shape[0]).from_address(held[8])
            sums = sums + torch.frombuffer(bias, dtype=torch.float32)[:, None]
        self._matrix(d, d_layout).copy_(sums)
        self.workspace_bytes = workspace_bytes.value
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(cublaslt, "_opened", lambda device: (made, ctypes.c_void_p(1)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: type("Stream", (), {"cuda_stream": 0})())
    return made


@pytest.mark.parametrize("a_by_columns", [False, True])
@pytest.mark.parametrize("b_by_columns", [False, True])
@pytest.mark.parametrize("epilogue", [Epilogue.NOTHING, Epilogue.BIAS])
def test_rows_are_columns_to_the_library(
    library: Library, a_by_columns: bool, b_by_columns: bool, epilogue: Epilogue
) -> None:
    draw = torch.Generator().manual_seed(0)

    def drawn(rows: int, columns: int, by_columns: bool) -> Tensor:
        """With a gap after every row, or column."""
        sizes = (columns, rows + 3) if by_columns else (rows, columns + 3)
        made = torch.randint(-4, 5, sizes, generator=draw).float()
        return made[:, :rows].t() if by_columns else made[:, :columns]

    a, b = drawn(5, 7, a_by_columns), drawn(7, 4, b_by_columns)
    whole = torch.full((5, 6), 99.0)
    out, bias = whole[:, :4], torch.arange(4.0)
    factors = [matmul_autotune._factor(one) for one in (a, b, out)]
    product = Product(
        rows=5, columns=4, inner=7, a=factors[0], b=factors[1], out=factors[2], type=torch.float32,  # type: ignore[arg-type]
        out_type=torch.float32, epilogue=epilogue,
    )  # fmt: skip
    call = cublaslt.Call(product, 0)
    call.set_epilogue(bias=bias)
    found = call.algorithms(8)
    assert [one.workspace_bytes for one in found] == [256, 512]  # the one between them has a status
    assert library.wanted == {
        1: 32 << 20, 3: 2, **dict(zip((5, 6, 7, 8), (one.alignment_bytes for one in (factors[1], factors[0], factors[2], factors[2])), strict=True)),  # type: ignore[union-attr]  # noqa: E501
    }  # fmt: skip
    call.run(found[1], a, b, out)
    assert torch.equal(out, a @ b + (bias if epilogue is Epilogue.BIAS else 0))
    assert (whole[:, 4:] == 99.0).all()
    assert library.workspace_bytes == 512


def test_what_the_library_refuses_is_an_error(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    a = torch.ones(2, 2)
    factor = matmul_autotune._factor(a)
    assert factor is not None
    product = Product(
        rows=2, columns=2, inner=2, a=factor, b=factor, out=factor, type=torch.float32, out_type=torch.float32,
        epilogue=Epilogue.NOTHING,
    )  # fmt: skip
    call = cublaslt.Call(product, 0)
    monkeypatch.setattr(library, "cublasLtMatmul", lambda *args: 15)
    with pytest.raises(RuntimeError, match="cublasLtMatmul gave status 15 for Product"):
        call.run(FIRST, a, a, torch.empty(2, 2))


class Matrix:
    """A matrix on a GPU, as far as it is looked at."""

    is_cuda = True

    def __init__(self, *shape: int, dtype: torch.dtype = torch.bfloat16, by_columns: bool = False, at: int = 512):
        self.shape, self.ndim, self.dtype, self._by_columns, self._at = shape, len(shape), dtype, by_columns, at

    def stride(self) -> tuple[int, ...]:
        rows, columns = self.shape
        return (1, rows) if self._by_columns else (columns, 1)

    def numel(self) -> int:
        return self.shape[0] * self.shape[-1]

    def data_ptr(self) -> int:
        return self._at


FLOAT = torch.float32
LEFT_TO_TORCH: dict[str, tuple[Matrix, Matrix, Matrix, Epilogue]] = {
    "float32": (Matrix(4, 8, dtype=FLOAT), Matrix(8, 2, dtype=FLOAT), Matrix(4, 2, dtype=FLOAT), Epilogue.NOTHING),
    "two types": (Matrix(4, 8), Matrix(8, 2, dtype=torch.float16), Matrix(4, 2), Epilogue.NOTHING),
    "a vector": (Matrix(4, 8), Matrix(8), Matrix(4), Epilogue.NOTHING),
    "nothing": (Matrix(0, 8), Matrix(8, 2), Matrix(0, 2), Epilogue.NOTHING),
    "no inner size": (Matrix(4, 0), Matrix(0, 2), Matrix(4, 2), Epilogue.NOTHING),
    "a result by columns": (Matrix(4, 8), Matrix(8, 2), Matrix(4, 2, by_columns=True), Epilogue.NOTHING),
    "float64": (Matrix(4, 8), Matrix(8, 2), Matrix(4, 2, dtype=torch.float64), Epilogue.NOTHING),
    "an activation in float32": (Matrix(4, 8), Matrix(8, 2), Matrix(4, 2, dtype=FLOAT), Epilogue.GELU_BACKWARD),
}


@pytest.mark.parametrize("what", LEFT_TO_TORCH)
def test_what_is_left_to_torch(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    asked_for: Any = LEFT_TO_TORCH[what]
    assert matmul_autotune._product_of(*asked_for) is None


def test_what_a_choice_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def ask(at: int = 512, bias_at: int = 512, dtype: torch.dtype = torch.bfloat16) -> Product | None:
        operands: Any = (Matrix(4, 8, at=at), Matrix(8, 2, by_columns=True), Matrix(4, 2, dtype=dtype))
        bias: Any = Matrix(2, at=bias_at)
        return matmul_autotune._product_of(*operands, *((Epilogue.BIAS, (bias,)) if dtype is torch.bfloat16 else ()))

    first = ask()
    assert first is not None
    assert (first.rows, first.columns, first.inner, first.epilogue_alignment_bytes) == (4, 2, 8, (256,))
    assert (first.a.by_columns, first.b.by_columns, first.b.stride) == (False, True, 8)
    others = [ask(at=528), ask(bias_at=528), ask(dtype=FLOAT)]
    assert None not in others
    assert len({first, *others}) == 4
    assert ask() == first
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert ask() is None
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)  # a torch for GPUs of others
    assert ask() is None
