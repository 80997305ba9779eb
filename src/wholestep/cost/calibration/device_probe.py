"""Micro-benchmarks of a device: the ceiling of every kind of kernel.

[Note: memory as a step finds it]
What a kernel reads is sometimes in a cache, because it was just written, and sometimes not; and what it writes is
sometimes memory that the allocator holds, and sometimes memory that the operating system hands out anew, page by page.
On a CPU both make a factor of two and more. So probes read every tensor of a pool larger than a cache twice in a row,
and keep every second result until the round ends, of large ones all: half of the reads and half of the writes are cold,
which is what steps do on average, and large blocks come from the operating system every time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.nn import functional as F

from wholestep.cost.calibration.host_probe import probe_host
from wholestep.cost.curve import Curve, fitted
from wholestep.cost.device_model import TUNED, Device, dtype_name
from wholestep.cost.flops import Kind, attention_flops, convolution_flops, matmul_flops
from wholestep.ir import node_meta

aten = torch.ops.aten

REPEATS = 5
"""Rounds of a probe."""
MOST_TENSORS = 256
"""How many tensors a probe takes in turn, at most."""
LARGE_BYTES = 2**21
"""Of results: from here on none reuses the memory of an earlier one."""
ROUND_FLOPS = 3e8
"""Arithmetic of the probes that are bound by it, per pass through their tensors."""

_CALLS = (Kind.POINTWISE, Kind.IN_PLACE, Kind.VIEW, Kind.NUMBER)
"""What takes the CPU no time but that of the call, where there are few numbers."""

Round = Callable[[], object]
Call = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large the probes are."""

    elements: Sequence[int]
    """Of kernels bound by memory; multiples of 64."""
    products: Sequence[tuple[int, int, int]]
    """Linear layers: (rows of the batch, features in, features out)."""
    convolutions: Sequence[tuple[int, int, int, int]]
    """(batch, in channels, out channels, height and width), kernels of 3 x 3; channels in whole blocks."""
    attentions: Sequence[tuple[int, int, int, int]]
    """(batch, heads, length, width)."""
    dtypes: Sequence[torch.dtype]
    """Of products, convolutions and attention."""
    pool_bytes: int
    """Bytes of the memory from which the tensors of a probe are taken in turn; of float32, less for narrower types."""
    messages_bytes: Sequence[int] = tuple(2**power for power in range(10, 27, 2))
    """Of collectives, rising. By default 1 KiB to 64 MiB."""


CPU_SIZES = Sizes(
    elements=(64, 1024, 4096, 16384, 65536, 262144, 1048576),
    products=((8, 8, 8), (32, 32, 32), (32, 64, 64), (128, 64, 128), (512, 128, 256), (1024, 256, 1024)),
    convolutions=((1, 16, 16, 8), (4, 16, 16, 8), (4, 32, 32, 8), (16, 16, 32, 16), (8, 64, 64, 16)),
    attentions=((1, 1, 16, 16), (2, 2, 64, 32), (4, 4, 128, 56), (4, 4, 256, 64)),
    dtypes=(torch.float32, torch.bfloat16),
    pool_bytes=2**26,
)
GPU_SIZES = Sizes(
    elements=(64, 16384, 262144, 1048576, 4194304, 16777216, 67108864),
    products=(
        (64, 64, 64),
        (512, 256, 256),
        (1024, 512, 512),
        (1024, 768, 3072),
        (4096, 2048, 2048),
        (8192, 4096, 4096),
    ),
    convolutions=((8, 16, 16, 16), (32, 64, 64, 32), (64, 128, 128, 32), (64, 256, 256, 32)),
    attentions=((1, 2, 128, 64), (4, 8, 512, 64), (8, 12, 1024, 64), (4, 16, 2048, 128)),
    dtypes=(torch.float32, torch.bfloat16),
    pool_bytes=2**30,
)


def sizes_for(device: torch.device) -> Sizes:
    """The sizes that suit the type of device."""
    return GPU_SIZES if device.type == "cuda" else CPU_SIZES


def probe_device(
    device: torch.device,
    sizes: Sizes,
    report: Callable[[str], None] = lambda what: None,
    instead: Mapping[Any, Call] | None = None,
) -> Device:
    """Measures `device`; `report` is called with the name of what comes next. Some seconds.

    `instead`: what else may compute products in float32, ``aten.mm.default`` and ``aten.addmm.default``; the faster
    one counts where a compiler may choose (`Device.tuned`).
    """
    host_is_device = device.type == "cpu"
    with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), _stream(device):
        report("the host")
        calls_us, listed_us = probe_host(device)
        points: dict[str, list[tuple[float, float]]] = {}
        memory = torch.randn(sizes.pool_bytes // 4, device=device)
        products = (_products(memory.to(dtype), sizes) for dtype in sizes.dtypes)
        other = _linear_layers(memory, sizes, instead) if instead else ()
        for name, amount, calls, one_round in chain(_streams(memory, sizes), *products, other):
            report(f"{name}, {amount:.2g}")
            points.setdefault(name, []).append((amount, _round_us(one_round, device) / calls))
    for name in [one for one in points if one.startswith(TUNED)]:
        best = dict(points[name])
        points[name] = [(amount, min(us, best[amount])) for amount, us in points[name.removeprefix(TUNED)]]
    curves = {name: fitted(measured) for name, measured in points.items()}
    if host_is_device:
        curves, calls_us = _without_calls(curves, calls_us)
    return Device(curves=curves, calls_us=calls_us, us_per_listed_tensor=listed_us, host_is_device=host_is_device)


def _without_calls(
    curves: Mapping[str, Curve], calls_us: Mapping[str, float]
) -> tuple[dict[str, Curve], dict[str, float]]:
    """Where the host is the device its time is in both: what the probes of kernels have of it is taken off theirs.

    Operators that do next to nothing to a few numbers say what it is, and the others are called at the same price.
    """
    kept = {kind: us for kind, us in calls_us.items() if kind in _CALLS}
    paid = {name: curve.floor_us for name, curve in curves.items()}
    return {name: curve.less(paid[name if name in kept else Kind.POINTWISE]) for name, curve in curves.items()}, kept


def _round_us(one_round: Round, device: torch.device) -> float:
    """Time of a round on the device: typical of several. On a GPU the rounds are replayed, without the host.

    On a CPU it is time of this thread: what other programs take of the machine meanwhile is none of ours.
    """
    one_round()
    if device.type == "cuda":
        return _replayed_us(one_round, device)
    times = []
    for _ in range(REPEATS):
        start = time.thread_time()
        one_round()
        times.append(1e6 * (time.thread_time() - start))
    return _typical(times)


def _stream(device: torch.device) -> AbstractContextManager[Any]:
    """One stream for all: a backward runs on the stream of its forward, and the default one cannot be captured."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


def _replayed_us(one_round: Round, device: torch.device) -> float:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            one_round()
        times = []
        for _ in range(REPEATS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(1e3 * start.elapsed_time(end))
    return _typical(times)


def _typical(times: Sequence[float]) -> float:
    """The median: a step is a sum of such times, of good ones and of bad ones."""
    return sorted(times)[len(times) // 2]


Probe = tuple[str, float, int, Round]
"""Name of the curve, amount of work of a call, calls in a round, the round."""


def _streams(memory: torch.Tensor, sizes: Sizes) -> Iterator[Probe]:
    """Kernels bound by memory."""
    for elements in sizes.elements:
        count = max(2, min(MOST_TENSORS, memory.numel() // elements))
        pool = _cut(memory, count, (max(1, elements // 256), min(256, elements)))
        for kind, (unit, calls) in _stream_calls(*pool[-1]).items():
            yield from _probe(kind, unit * elements, pool, calls)
        images = [(one.view((4, 16, -1) if elements < 2**16 else (16, 64, -1)),) for (one,) in pool]
        yield from _probe(Kind.BATCH_NORM, elements, images, [_batch_norm(*images[-1])])


def _stream_calls(other: torch.Tensor) -> dict[Kind, tuple[float, list[Call]]]:
    """Amount of work per element, and calls that do it to a tensor like `other`, (rows, width) float32."""
    width = other.shape[1]
    weight, bias = (torch.ones(width, device=other.device) for _ in range(2))
    _, mean, inverse = aten.native_layer_norm.default(other, [width], weight, bias, 1e-5)
    soft = aten._log_softmax.default(other, 1, False)
    norm_gradients, soft_gradients = aten.native_layer_norm_backward.default, aten._log_softmax_backward_data.default
    return {
        Kind.POINTWISE: (12.0, [lambda x: aten.add.Tensor(x, other)]),
        Kind.IN_PLACE: (8.0, [lambda x: aten.mul_.Tensor(x, 0.999)]),
        Kind.REDUCTION: (4.0, [lambda x: aten.sum.dim_IntList(x, [0], True)]),
        Kind.FUNCTION: (1.0, [aten.tanh.default, aten.exp.default, aten.sigmoid.default]),
        Kind.NORM: (1.0, [lambda x: aten.native_layer_norm.default(x, [width], weight, bias, 1e-5)]),
        Kind.NORM_BACKWARD: (1.0, [
            lambda x: norm_gradients(x, other, [width], mean, inverse, weight, bias, [True] * 3)]),
        Kind.SOFTMAX: (1.0, [lambda x: aten._log_softmax.default(x, 1, False)]),
        Kind.SOFTMAX_BACKWARD: (1.0, [lambda x: soft_gradients(x, soft, 1, x.dtype)]),
    }  # fmt: skip


def _batch_norm(image: torch.Tensor) -> Call:
    """Batch norm of images like this one, (samples, channels, pixels) float32, in training."""
    channels = [torch.ones(image.shape[1], device=image.device) for _ in range(4)]
    return lambda x: aten.native_batch_norm.default(x, *channels, True, 0.1, 1e-5)


def _products(memory: torch.Tensor, sizes: Sizes) -> Iterator[Probe]:
    """Kernels bound by arithmetic, in the dtype of `memory`."""
    name, pool = dtype_name(memory.dtype), partial(_pool, memory)
    yield from _linear_layers(memory, sizes)
    for batch, into, out, side in sizes.convolutions:
        data, weight, grad = (batch, into, side, side), (out, into, 3, 3), (batch, out, side, side)
        flops = convolution_flops(weight, grad)
        operands = pool(flops, data, weight, grad)
        yield from _probe(f"{Kind.CONVOLUTION}/{name}", flops, operands, _CONVOLUTION_CALLS)
        yield from _probe(f"{Kind.CONVOLUTION_BACKWARD}/{name}", 2 * flops, operands, _CONVOLUTION_GRADIENT_CALLS)
    for batch, heads, length, width in sizes.attentions:
        shape = (batch, heads, length, width)
        forward, backward = (attention_flops(shape, shape, shape, causal=True, backward=one) for one in (False, True))
        packed = pool(backward, (batch, length, heads, 3 * width))
        operands = [tuple(one.transpose(1, 2).chunk(3, dim=-1)) for (one,) in packed]
        yield from _probe(f"{Kind.ATTENTION}/{name}", forward, operands, [_attend])
        attended = [_attended(*one) for one in operands]
        yield from _probe(f"{Kind.ATTENTION_BACKWARD}/{name}", backward, attended, [torch.autograd.grad])


def _linear_layers(memory: torch.Tensor, sizes: Sizes, instead: Mapping[Any, Call] | None = None) -> Iterator[Probe]:
    """Products of matrices; by what stands in the place of torch's, if something does."""
    name = f"{TUNED if instead else ''}{Kind.MATMUL}/{dtype_name(memory.dtype)}"
    addmm, mm = ((instead or {}).get(one, one) for one in (aten.addmm.default, aten.mm.default))
    calls: list[Call] = [
        lambda data, weight, bias, grad, weight_t, grad_t: addmm(bias, data, weight_t),
        lambda data, weight, bias, grad, weight_t, grad_t: mm(grad, weight),
        lambda data, weight, bias, grad, weight_t, grad_t: mm(grad_t, data),
    ]
    for rows, into, out in sizes.products:
        flops = matmul_flops((rows, out), into)
        layers = _pool(memory, 3 * flops, (rows, into), (out, into), (out,), (rows, out))
        turned = [(*layer, layer[1].t(), layer[3].t()) for layer in layers]
        yield from _probe(name, flops, turned, calls)


def _pool(memory: torch.Tensor, flops: float, *shapes: Sequence[int]) -> list[tuple[torch.Tensor, ...]]:
    """Operands of these shapes for calls of so much arithmetic."""
    whole = memory.numel() // sum(map(math.prod, shapes))
    return _cut(memory, max(2, min(MOST_TENSORS, whole, int(ROUND_FLOPS / flops))), *shapes)


def _cut(memory: torch.Tensor, count: int, *shapes: Sequence[int]) -> list[tuple[torch.Tensor, ...]]:
    """`count` tuples of tensors of these shapes, one after the other in `memory`; from its start again at its end."""
    lengths = [math.prod(shape) for shape in shapes]
    cut, at = [], 0
    for _ in range(count):
        at = at if at + sum(lengths) <= memory.numel() else 0
        parts = memory[at : at + sum(lengths)].split(lengths)
        cut.append(tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True)))
        at += sum(lengths)
    return cut


_CONVOLUTION = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
"""Stride, padding, dilation, transposed, output padding, groups."""
_CONVOLUTION_CALLS: list[Call] = [
    lambda data, weight, grad: aten.convolution.default(data, weight, None, *_CONVOLUTION),
]
_CONVOLUTION_GRADIENT_CALLS: list[Call] = [
    lambda data, weight, grad: aten.convolution_backward.default(
        grad, data, weight, None, *_CONVOLUTION, [True, True, False]
    ),
]


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention; operands lie side by side, as models have them."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def _attended(*operands: torch.Tensor) -> tuple[Any, ...]:
    """Arguments of ``torch.autograd.grad`` for the gradients of attention, any number of times."""
    with torch.enable_grad():
        leaves = [one.detach().requires_grad_() for one in operands]
        out = _attend(*leaves)
    return out, leaves, torch.ones_like(out), True


def _probe(name: str, amount: float, pool: Sequence[tuple[Any, ...]], calls: Sequence[Call]) -> Iterator[Probe]:
    """The probe of `calls` on every entry of `pool` (note *memory as a step finds it*)."""
    made = [(call, sum(one.nbytes for one in node_meta.tensors_in(call(*pool[0])))) for call in calls]
    larges = [(call, num_bytes >= LARGE_BYTES) for call, num_bytes in made]

    def one_round() -> None:
        for call, large in larges:
            kept = []
            for arguments in pool:
                kept.append(call(*arguments))
                again = call(*arguments)
                if large:
                    kept.append(again)

    yield name, amount, 2 * len(pool) * len(calls), one_round
