"""Products of float32 matrices on a CPU by the library that is the faster one here, found out while they are compiled.

After all that Inductor itself makes of products, each is timed once, by torch and by oneDNN (`lower/gemm/onednn.py`),
on random operands of its layout. Where oneDNN is faster its operator stands in the place of torch's, and so in what is
written down for other processes: they time nothing and compute the same bits. Nothing else imports this than
`lower/inductor/compile_fx.py`.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch._inductor import ir
from torch._inductor.lowering import register_lowering

from wholestep.cost.flops import matmul_flops
from wholestep.lower.gemm import onednn

log = logging.getLogger("wholestep")

_LEAST_FLOPS = 1e6
"""Of a product that is timed: about 10 us. What calls oneDNN takes a few of them."""
_LEAST_GAIN = 0.05
"""By how much oneDNN has to be faster."""
_ROUNDS = 7
"""Timed runs of either; the shortest counts, as others may compile meanwhile."""
_MOST_S = 0.5
"""For a product, after which no more rounds begin."""


@dataclass(frozen=True, slots=True)
class _Operand:
    """How a factor lies in memory, or a bias."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def blank(self) -> Tensor:
        """Random numbers that lie so."""
        reach = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return torch.randn(reach).as_strided(self.shape, self.stride)


def choose(graph: fx.Graph) -> int:
    """Has oneDNN compute the products of a graph that it is faster at, in operators of Inductor whose nodes know their
    fake tensors (``meta["val"]``). Gives how many there are.
    """
    instead = onednn.replacements()
    products = [node for node in graph.nodes if node.target in instead and _may_go(node)]
    found = list(filter(_is_faster, products))
    for node in found:
        node.target = instead[node.target]
    if products:
        log.debug("%d of %d products by oneDNN", len(found), len(products))
    return len(found)


def _may_go(node: fx.Node) -> bool:
    """Whether both libraries compute a product: of float32 numbers on the CPU, and not a small one.

    Which one is faster depends on the sizes: one that moves leaves the product to torch.
    """
    if node.kwargs:
        return False
    values: list[Any] = [one.meta.get("val") for one in (node, *node.all_input_nodes)]
    if not all(isinstance(one, Tensor) and one.is_cpu and one.dtype is torch.float32 for one in values):
        return False
    if not all(isinstance(size, int) for one in values for size in one.shape):
        return False
    return matmul_flops(values[0].shape, values[-1].shape[-2]) >= _LEAST_FLOPS


def _is_faster(node: fx.Node) -> bool:
    given = [arg.meta["val"] for arg in node.args]  # type: ignore[union-attr]
    return _gains(torch.get_num_threads(), *(_Operand(tuple(one.shape), one.stride()) for one in given))


@functools.cache
def _gains(num_threads: int, *operands: _Operand) -> bool:
    """Whether oneDNN is faster at a product with so many threads: a bias, if there is one, and two factors."""
    given = [one.blank() for one in operands]
    out = torch.empty(*given[-2].shape[:-1], given[-1].shape[-1])
    ways: dict[str, Callable[..., Any]] = {"torch": torch.matmul, "oneDNN": onednn.PRODUCT.out}
    if len(given) == 3:
        ways = {"torch": torch.addmm, "oneDNN": onednn.PRODUCT_ADD.out}
    times = _times_us({name: partial(way, *given, out=out) for name, way in ways.items()})
    shapes = " by ".join(str(list(one.shape)) for one in operands[-2:])
    log.debug("%s: %s us", shapes, ", ".join(f"{name} {us:.1f}" for name, us in times.items()))
    return times["oneDNN"] < (1 - _LEAST_GAIN) * times["torch"]


def _times_us(runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The shortest time of each, by turns, after one that is not counted: kernels are generated in it."""
    for run in runs.values():
        run()
    best, end = dict.fromkeys(runs, math.inf), time.perf_counter() + _MOST_S
    for _ in range(_ROUNDS):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], 1e6 * (time.perf_counter() - start))
        if time.perf_counter() > end:
            break
    return best


def _lowered(overload: Any) -> None:
    """Has Inductor write a call of an operator that is told where its result goes, not of one that allocates."""
    name = f"torch.ops.{overload._schema.name.replace('::', '.')}.out"

    def lower(*operands: Any) -> Any:
        given = [ir.ExternKernel.realize_input(one) for one in operands]
        a, b = given[-2:]
        layout = ir.FixedLayout(a.get_device_or_error(), a.get_dtype(), [*a.get_size()[:-1], b.get_size()[-1]])
        return ir.TensorBox.create(ir.ExternKernelOut(layout, given, python_kernel_name=name))

    register_lowering(overload, type_promotion_kind=None)(lower)


_lowered(onednn.PRODUCT.default)
_lowered(onednn.PRODUCT_ADD.default)
