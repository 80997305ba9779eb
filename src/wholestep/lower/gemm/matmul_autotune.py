"""Products of matrices by the algorithm of cublasLt that is the fastest here, found out in the first call.

cuBLAS chooses by a heuristic, which is 5 to 15 % off for some shapes. A product that a step computes is timed once, by
torch and by each algorithm that cublasLt names, on the very operands of the first call; the fastest stays. Choices are
kept with a saved step, so processes that load it compute the same bits and time nothing. Likewise for GELU with the
product beside it (`passes/rewrites/fuse_gelu.py`), by cublasLt in one kernel or apart.

Note: what stays with torch
    Whatever is no plain product of two matrices in half precision on an NVIDIA GPU; products within a capture that was
    not preceded by a call; everything under ``torch.use_deterministic_algorithms`` or Inductor's option of that name,
    as what is fastest may be another algorithm in the next process. Sums are always added up in float32.
"""

from __future__ import annotations

import functools
import logging
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from wholestep.ir import node_meta
from wholestep.ir.ops.library import LIBRARY
from wholestep.lower.gemm.cublaslt import Algorithm, Call, Epilogue, Factor, Product, version
from wholestep.passes.rewrites import fuse_gelu  # noqa: F401  # operators that are implemented here
from wholestep.util.log_once import log_once

log = logging.getLogger("wholestep")

_TRIED = 8
"""Algorithms per product."""
_ROUNDS = 5
"""Timed runs of each."""
_HEAD_START_CYCLES = 1 << 24
"""For which the GPU is kept busy while launches queue up behind: 9 ms."""
_GAIN = 0.02
"""By how much an algorithm has to be faster than torch."""
_ALIGNMENT_BYTES = 16
_HALF = (torch.bfloat16, torch.float16)
_aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What was chosen, for another process with the same library on a GPU of the same kind."""

    version: int
    algorithms: tuple[tuple[Product, Algorithm | None], ...]
    """None: torch's own is the fastest."""


_chosen: dict[Product, Algorithm | None] = {}
_calls: dict[tuple[int, Product], Call] = {}


def choices() -> Choices | None:
    """All that was chosen in this process; None if nothing was, or nothing could be."""
    known = _version()
    return Choices(version=known, algorithms=tuple(_chosen.items())) if _chosen and known is not None else None


def load_choices(found: Choices) -> None:
    """Uses choices of another process, if it had this library."""
    if found.version == _version():
        _chosen.update({product: algorithm for product, algorithm in found.algorithms if product not in _chosen})


def _version() -> int | None:
    """Of the library; None where there is none."""
    try:
        return version()
    except OSError:
        return None


def mm(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """``torch.mm(a, b, out=out)``."""
    _run(_product_of(a, b, out), (a, b, out), lambda: torch.mm(a, b, out=out))
    return out


def addmm(bias: Tensor, a: Tensor, b: Tensor, *, out: Tensor, alpha: float = 1, beta: float = 1) -> Tensor:
    """``torch.addmm(bias, a, b, alpha=alpha, beta=beta, out=out)``."""
    plain = alpha == beta == 1 and _is_bias(bias, out)
    product = _product_of(a, b, out, Epilogue.BIAS, (bias,)) if plain else None
    torchs = functools.partial(torch.addmm, bias, a, b, alpha=alpha, beta=beta, out=out)
    _run(product, (a, b, out), torchs, bias=bias)
    return out


def mm_dtype(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """``aten::mm.dtype``: a product of `a` and `b` in another type."""
    out = torch.empty(a.shape[0], b.shape[1], dtype=dtype, device=a.device)
    return mm_dtype_out(a, b, dtype, out=out)


def mm_dtype_out(a: Tensor, b: Tensor, dtype: torch.dtype, *, out: Tensor) -> Tensor:
    """``aten::mm.dtype_out``, likewise."""
    _run(_product_of(a, b, out), (a, b, out), lambda: _aten.mm.dtype_out(a, b, dtype, out=out))
    return out


def product_gelu(bias: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """See `wholestep.passes.rewrites.fuse_gelu`, which says what the operator of this name gives."""
    pre = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    hidden = torch.empty_like(pre)

    def apart() -> None:
        addmm(bias, a, b, out=pre)
        _aten.gelu.out(pre, approximate="tanh", out=hidden)

    plain = _is_bias(bias, hidden) and _is_extra(pre)
    product = _product_of(a, b, hidden, Epilogue.BIAS_AND_GELU, (bias, pre)) if plain else None
    _run(product, (a, b, hidden), apart, bias=bias, extra=pre)
    return hidden, pre


def product_gelu_backward(a: Tensor, b: Tensor, pre: Tensor) -> Tensor:
    """See `wholestep.passes.rewrites.fuse_gelu`, likewise."""
    gradient = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)

    def apart() -> None:
        product = mm(a, b, out=torch.empty_like(gradient))
        _aten.gelu_backward.grad_input(product, pre, approximate="tanh", grad_input=gradient)

    product = _product_of(a, b, gradient, Epilogue.GELU_BACKWARD, (pre,)) if _is_extra(pre) else None
    _run(product, (a, b, gradient), apart, extra=pre)
    return gradient


def activates(product: fx.Node) -> bool:
    """Whether a product with an activation may be asked for: in half precision, on an NVIDIA GPU."""
    value = node_meta.tensor(product)
    return value.is_cuda and torch.version.cuda is not None and value.dtype in _HALF


class Products:
    """A namespace of functions by torch's names, in which products are ours."""

    mm, addmm = staticmethod(mm), staticmethod(addmm)

    def __init__(self, others: object) -> None:
        """`others`: where all other functions are."""
        self._others = others

    def __getattr__(self, name: str) -> Any:
        return getattr(self._others, name)


def operators() -> dict[Any, Callable[..., Any]]:
    """Operators that a program calls itself, and what computes them here."""
    return {_aten.mm.dtype: mm_dtype, _aten.mm.dtype_out: mm_dtype_out}


def _product_of(
    a: Tensor, b: Tensor, out: Tensor, epilogue: Epilogue = Epilogue.NOTHING, extras: tuple[Tensor, ...] = ()
) -> Product | None:
    """The product as cublasLt sees it; None for what is left to torch."""
    if not (a.is_cuda and a.dtype is b.dtype and a.dtype in _HALF and a.ndim == b.ndim == out.ndim == 2):
        return None
    if out.dtype is not a.dtype and (out.dtype is not torch.float32 or epilogue is not Epilogue.NOTHING):
        return None
    factors = [_factor(one) for one in (a, b, out)]
    if torch.version.cuda is None or None in factors or not out.numel() or not a.numel():
        return None
    if torch.are_deterministic_algorithms_enabled() or factors[2].by_columns:  # type: ignore[union-attr]
        return None
    first, second, result = factors
    return Product(
        rows=out.shape[0], columns=out.shape[1], inner=a.shape[1], a=first, b=second, out=result,  # type: ignore[arg-type]
        type=a.dtype, out_type=out.dtype, epilogue=epilogue,
        epilogue_alignment_bytes=tuple(map(_alignment_bytes, extras)),
    )  # fmt: skip


def _factor(matrix: Tensor) -> Factor | None:
    """How a matrix lies in memory; None where neither rows nor columns are whole."""
    (rows, columns), (down, right) = matrix.shape, matrix.stride()
    alignment = _alignment_bytes(matrix)
    if right == 1 and down >= columns:
        return Factor(by_columns=False, stride=down, alignment_bytes=alignment)
    if down == 1 and right >= rows:
        return Factor(by_columns=True, stride=right, alignment_bytes=alignment)
    return None


def _alignment_bytes(tensor: Tensor) -> int:
    """The largest power of two that divides the address, up to what cublasLt tells apart."""
    address = tensor.data_ptr()
    return min(256, address & -address) if address else 256


def _is_bias(bias: Tensor, out: Tensor) -> bool:
    is_row = bias.ndim == 1 or (bias.ndim == 2 and bias.stride(0) == 0)
    aligned = bias.data_ptr() % _ALIGNMENT_BYTES == 0
    return is_row and bias.shape[-1] == out.shape[-1] and bias.stride(-1) == 1 and bias.dtype is out.dtype and aligned


def _is_extra(extra: Tensor) -> bool:
    """Whether the library can read and write this beside a product: it wants rows of whole vectors."""
    return extra.is_contiguous() and extra.shape[-1] % 8 == 0 and extra.data_ptr() % _ALIGNMENT_BYTES == 0


def _run(
    product: Product | None, operands: tuple[Tensor, Tensor, Tensor], torchs: Callable[[], object], **extras: Tensor
) -> None:
    """Writes a product by what was chosen for it, which is chosen if it was not. `torchs` is how torch does it."""
    if product is None:
        torchs()
        return
    if product not in _chosen and torch.cuda.is_current_stream_capturing():
        torchs()
        return
    with torch.cuda.device_of(operands[2]):
        if product not in _chosen:
            _chosen[product] = _fastest(product, operands, torchs, extras)
        algorithm = _chosen[product]
        if algorithm is None:
            torchs()
            return
        call = _call_of(product, operands[2].device)
        call.set_epilogue(**extras)
        call.run(algorithm, *operands)


def _call_of(product: Product, device: torch.device) -> Call:
    key = (device.index, product)
    if key not in _calls:
        _calls[key] = Call(product, device.index)
    return _calls[key]


def _fastest(
    product: Product, operands: tuple[Tensor, Tensor, Tensor], torchs: Callable[[], object], extras: dict[str, Tensor]
) -> Algorithm | None:
    """The algorithm that beats torch and all others; None where none does."""
    try:
        call = _call_of(product, operands[2].device)
        call.set_epilogue(**extras)
        tried: list[Algorithm | None] = [None, *call.algorithms(_TRIED)]
    except (OSError, RuntimeError) as error:
        log_once(logging.INFO, f"products are left to torch: {error}")
        return None
    runs: list[Callable[[], object]] = [torchs]
    for algorithm in tried[1:]:
        assert algorithm is not None
        runs.append(functools.partial(call.run, algorithm, *operands))
    times = _times_ms(runs)
    best = min(range(len(times)), key=times.__getitem__)
    log.debug("%s: %.4f ms by torch, %.4f by the fastest of %d", product, times[0], times[best], len(times) - 1)
    return tried[best] if times[best] < (1 - _GAIN) * times[0] else None


def _times_ms(runs: Iterable[Callable[[], object]]) -> list[float]:
    """Of runs on the current stream, by turns, each after one that is not timed; infinite for what is refused."""
    able: list[Callable[[], object] | None] = []
    for run in runs:
        try:
            run()
            able.append(run)
        except RuntimeError:
            able.append(None)
    marks: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in able]
    # The GPU must not wait for launches, which take longer than small products.
    getattr(torch.cuda, "_sleep", lambda cycles: None)(_HEAD_START_CYCLES)
    for _ in range(_ROUNDS):
        for timed, marked in zip(able, marks, strict=True):
            if timed is not None:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                timed()
                end.record()
                marked.append((start, end))
    torch.cuda.current_stream().synchronize()
    return [statistics.median(a.elapsed_time(b) for a, b in one) if one else float("inf") for one in marks]


LIBRARY.impl("product_gelu", product_gelu, "CompositeExplicitAutograd")
LIBRARY.impl("product_gelu_backward", product_gelu_backward, "CompositeExplicitAutograd")
