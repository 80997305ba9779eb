"""cublasLt, called directly: the only file that knows its C interface.

torch asks cuBLAS for one algorithm per product, by a heuristic. cublasLt names several, runs the one that it is given,
and can apply an activation to sums before they are rounded and written.

cublasLt stores matrices by columns. What lies row by row is the transposed matrix to it, so ``out = a @ b`` is asked
for as ``out.t() = b.t() @ a.t()``: `b` comes first, rows are columns, and nothing is copied.

Source: NVIDIA, cuBLAS library documentation, "Using the cublasLt API". Numbers of enumerators are those of
``cublasLt.h``, which have not changed since CUDA 11.
"""

from __future__ import annotations

import ctypes
import enum
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

_COMPUTE_FLOAT32 = 68
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_REDUCES_IN_FLOAT32 = 2
_MOST_WORKSPACE_BYTES = 32 << 20
"""What torch gives cuBLAS on Hopper."""
_TRANSPOSES_A, _TRANSPOSES_B, _EPILOGUE, _BIAS, _EXTRA, _EXTRA_STRIDE = 3, 4, 7, 8, 11, 12  # of a product
_WORKSPACE_BYTES, _REDUCTIONS, _ALIGNMENT = 1, 3, (5, 6, 7, 8)  # of a preference


class Epilogue(enum.IntEnum):
    """What is done with a sum before it is rounded and written."""

    NOTHING = 1
    BIAS = 4
    BIAS_AND_GELU = 32 | 128 | 4
    """GELU by tanh, and the sum with its bias besides."""
    GELU_BACKWARD = 64 | 128
    """The sum times the derivative of GELU by tanh at a given place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """A matrix as it lies in memory."""

    by_columns: bool
    """Whether elements of a column lie side by side, and not those of a row."""
    stride: int
    """Elements from a row, or column, to the next."""
    alignment_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """All that the choice of an algorithm depends on."""

    rows: int
    columns: int
    inner: int
    a: Factor
    b: Factor
    out: Factor
    type: torch.dtype
    """Of the factors, the bias, and what goes into or comes out of an activation."""
    out_type: torch.dtype
    epilogue: Epilogue
    epilogue_alignment_bytes: tuple[int, ...] = ()
    """Of the operands of the epilogue."""


class _Algorithm(ctypes.Structure):
    """As cublasLt describes one; nobody else reads it."""

    _fields_ = [("data", ctypes.c_uint64 * 8)]


class _Found(ctypes.Structure):
    _fields_ = [
        ("algorithm", _Algorithm), ("workspace_bytes", ctypes.c_size_t), ("status", ctypes.c_int),
        ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One way to compute a product, for this version of cublasLt on this kind of GPU."""

    data: bytes
    workspace_bytes: int


class Call:
    """A product that can be run. Objects of cublasLt that it holds live as long as the process."""

    def __init__(self, product: Product, device: int) -> None:
        """`device`: the number of the GPU. Raises OSError where there is no cublasLt, and RuntimeError for what it
        refuses."""
        self._library, self._handle = _opened(device)
        self._product = product
        self._description = self._made("MatmulDescCreate", _COMPUTE_FLOAT32, _TYPES[torch.float32])
        # What is `b` here is its first factor.
        self._set(_TRANSPOSES_A, ctypes.c_int(product.b.by_columns))
        self._set(_TRANSPOSES_B, ctypes.c_int(product.a.by_columns))
        self._set(_EPILOGUE, ctypes.c_int(product.epilogue))
        if product.epilogue in (Epilogue.BIAS_AND_GELU, Epilogue.GELU_BACKWARD):
            self._set(_EXTRA_STRIDE, ctypes.c_int64(product.columns))
        small, large = _TYPES[product.type], _TYPES[product.out_type]
        self._first = self._layout(small, product.b, product.columns, product.inner)
        self._second = self._layout(small, product.a, product.inner, product.rows)
        self._result = self._layout(large, product.out, product.columns, product.rows)

    def set_epilogue(self, *, bias: Tensor | None = None, extra: Tensor | None = None) -> None:
        """Names the operands of the epilogue, which the choice of an algorithm looks at as well as its run.

        `extra`, of the shape of the result and contiguous, is what GELU is computed of, or was.
        """
        if bias is not None:
            self._set(_BIAS, ctypes.c_void_p(bias.data_ptr()))
        if extra is not None:
            self._set(_EXTRA, ctypes.c_void_p(extra.data_ptr()))

    def algorithms(self, limit: int) -> list[Algorithm]:
        """Those that cublasLt would try, the one first that it holds for the fastest; [] where it knows none."""
        preference = self._made("MatmulPreferenceCreate")
        wanted: list[tuple[int, ctypes._SimpleCData[int]]] = [
            (_WORKSPACE_BYTES, ctypes.c_size_t(_MOST_WORKSPACE_BYTES)),
            (_REDUCTIONS, ctypes.c_uint32(_REDUCES_IN_FLOAT32)),
        ]
        product = self._product
        aligned = (product.b, product.a, product.out, product.out)
        wanted += [(what, ctypes.c_uint32(one.alignment_bytes)) for what, one in zip(_ALIGNMENT, aligned, strict=True)]
        for what, value in wanted:
            self._call("MatmulPreferenceSetAttribute", preference, what, ctypes.byref(value), _size(value))
        found, count = (_Found * limit)(), ctypes.c_int()
        layouts = (self._first, self._second, self._result, self._result)
        ask = self._library.cublasLtMatmulAlgoGetHeuristic
        refused = ask(
            self._handle, self._description, *layouts, preference, limit, ctypes.byref(found), ctypes.byref(count)
        )
        return [] if refused else [
            Algorithm(bytes(one.algorithm), one.workspace_bytes) for one in found[: count.value] if one.status == 0
        ]  # fmt: skip

    def run(self, algorithm: Algorithm, a: Tensor, b: Tensor, out: Tensor) -> None:
        """Writes ``a @ b`` to `out`, on the current stream. Raises RuntimeError where cublasLt refuses."""
        room = torch.empty(algorithm.workspace_bytes, dtype=torch.uint8, device=out.device)
        one, nothing, target = ctypes.c_float(1.0), ctypes.c_float(0.0), ctypes.c_void_p(out.data_ptr())
        chosen = _Algorithm.from_buffer_copy(algorithm.data)
        self._call(
            "Matmul", self._handle, self._description, ctypes.byref(one),
            ctypes.c_void_p(b.data_ptr()), self._first, ctypes.c_void_p(a.data_ptr()), self._second,
            ctypes.byref(nothing), target, self._result, target, self._result, ctypes.byref(chosen),
            ctypes.c_void_p(room.data_ptr()), ctypes.c_size_t(algorithm.workspace_bytes),
            ctypes.c_void_p(torch.cuda.current_stream(out.device).cuda_stream),
        )  # fmt: skip

    def _layout(self, type_of: int, factor: Factor, rows: int, columns: int) -> ctypes.c_void_p:
        """The layout of a factor that would be `rows` x `columns` if cublasLt did not have to transpose it."""
        sizes = (columns, rows) if factor.by_columns else (rows, columns)
        counts = map(ctypes.c_uint64, sizes)
        return self._made("MatrixLayoutCreate", type_of, *counts, ctypes.c_int64(factor.stride))

    def _made(self, what: str, *args: object) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self._call(what, ctypes.byref(made), *args)
        return made

    def _set(self, what: int, value: ctypes._SimpleCData[int] | ctypes.c_void_p) -> None:
        self._call("MatmulDescSetAttribute", self._description, what, ctypes.byref(value), _size(value))

    def _call(self, what: str, *args: object) -> None:
        status = getattr(self._library, f"cublasLt{what}")(*args)
        if status:
            raise RuntimeError(f"cublasLt{what} gave status {status} for {self._product}")


def version() -> int:
    """Of the library: algorithms mean nothing to another one. Raises OSError where there is none."""
    get = _library().cublasLtGetVersion
    get.restype = ctypes.c_size_t
    return int(get())


@functools.cache
def _library() -> ctypes.CDLL:
    """The library that torch has loaded."""
    if torch.version.cuda is None:
        raise OSError("this torch was not built for CUDA")
    return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")


@functools.cache
def _opened(device: int) -> tuple[ctypes.CDLL, ctypes.c_void_p]:
    """The library, and a handle for a GPU."""
    library, handle = _library(), ctypes.c_void_p()
    with torch.cuda.device(device):
        if status := library.cublasLtCreate(ctypes.byref(handle)):
            raise OSError(f"cublasLtCreate gave status {status}")
    return library, handle


def _size(value: object) -> ctypes.c_size_t:
    return ctypes.c_size_t(ctypes.sizeof(value))  # type: ignore[arg-type]
