"""Micro-benchmark of the host: time per call of the eager backend, by kind of kernel.

[Note: a step in small]
In a loop over one operator Python, the dispatcher and the allocator find all that they touch in the nearest cache. In a
step thousands of different calls follow each other, and each costs up to twice as much. So the probe is a program of
the form that steps have, rendered and run as they are: operators of all kinds in turn on small tensors of their own, a
name deleted after its last reader, and before each line two looks at the clock, the second of which says what looking
costs.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

import torch
import torch.fx as fx

from wholestep.cost.flops import Kind
from wholestep.ir import printer
from wholestep.ir.program import Program, Stage

aten = torch.ops.aten

LAYERS = 24
"""How often the program has every layer, each time with other tensors."""
ROUNDS = 9
"""Runs that are timed, after one that is not."""
_CONVOLUTION = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
"""Stride, padding, dilation, transposed, output padding, groups."""


def probe_host(device: torch.device) -> tuple[dict[str, float], float]:
    """What a call costs the host by `Kind`, and each tensor of a list besides; us. On the CPU with the kernel.

    See the note *a step in small*.
    """
    small = _SmallStep(device)
    small.layers()
    small.lists()
    small.graph.output(())
    program = Program(module=fx.GraphModule({}, small.graph), inputs=(), outputs=(), stage=Stage.SCHEDULED)
    rendered = printer.render(program, short_names=True)
    ticks: list[int] = []
    namespace = {**rendered.namespace, "tick": ticks.append, "clock": time.perf_counter_ns}
    exec(compile(_ticking(rendered), "<a step in small>", "exec"), namespace)
    rounds = []
    for _ in range(ROUNDS + 1):
        _synchronize(device)
        ticks.clear()
        namespace["step"](list(small.inputs))
        rounds.append(_between_us(ticks))
    typical = dict(zip(rendered.nodes.values(), map(median, zip(*rounds[1:], strict=True)), strict=True))
    calls_us = {
        kind: fmean(us for node, us in typical.items() if small.kinds.get(node) is kind)
        for kind in dict.fromkeys(small.kinds.values())
    }
    # The operator is another one on every device, and its arguments are results of the one before it.
    calls_us[Kind.ATTENTION_BACKWARD] = calls_us[Kind.ATTENTION]
    listed_us = fmean((typical[node] - calls_us[kind]) / length for node, kind, length in small.listed)
    return {str(kind): us for kind, us in calls_us.items()}, max(0.01, listed_us)


def _ticking(rendered: printer.Rendered) -> str:
    """The text with two looks at the clock before every node, and after the last."""
    lines = []
    for number, line in enumerate(rendered.text.splitlines(), 1):
        if number in rendered.nodes or line.startswith("    return"):
            lines += ["    tick(clock())"] * 2
        lines.append(line)
    return "\n".join(lines)


def _between_us(ticks: Sequence[int]) -> list[float]:
    """Time from every pair of ticks to the next, less what a look takes."""
    looked, started, ended = ticks[::2], ticks[1::2], ticks[2::2]
    return [1e-3 * max(0, end - 2 * start + look) for look, start, end in zip(looked, started, ended, strict=False)]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _SmallStep:
    """A graph in the making: forward, backward and update of layers that have something of everything."""

    def __init__(self, device: torch.device) -> None:
        self.graph = fx.Graph()
        self.inputs: list[torch.Tensor | float] = []
        self.kinds: dict[fx.Node, Kind] = {}
        self.listed: list[tuple[fx.Node, Kind, int]] = []
        """Operators on lists: kind, and how long the lists are."""
        self._device = device
        self._rate = self._leaf(0.9)
        self._averages: list[tuple[fx.Node, fx.Node]] = []

    def layers(self) -> None:
        """Adds all layers, then all updates."""
        rows, image, heads = (8, 16), (2, 16, 4, 4), (2, 2, 4, 16)
        gradients: list[tuple[fx.Node, Sequence[int]]] = []
        for _ in range(LAYERS):
            gradients.append((self._dense(rows), (rows[1], rows[1])))
            gradients.append((self._image(image), (image[1], image[1], 3, 3)))
            gradients.append((self._attention(heads, rows), rows))
        for gradient, shape in gradients:
            self._update(gradient, shape)

    def lists(self) -> None:
        """Adds operators on lists of what the layers have updated, and a bucket that is taken apart."""
        ones, others = (list(group) for group in zip(*self._averages, strict=True))
        sizes = [8] * len(ones)
        flat = self._leaf([sum(sizes)])
        for kind, target, args in (
            (Kind.IN_PLACE, aten._foreach_lerp_.Scalar, (ones, others, 0.1)),
            (Kind.IN_PLACE, aten._foreach_copy_.default, (others, ones)),
            (Kind.VIEW, aten.split_with_sizes.default, (flat, sizes)),
        ):
            self.listed.append((self.graph.call_function(target, args), kind, len(ones)))

    def _leaf(self, value: float | Sequence[int]) -> fx.Node:
        """An input: a number, or a tensor of that shape."""
        made = value if isinstance(value, float) else torch.rand(value, device=self._device)
        self.inputs.append(made)
        return self.graph.placeholder(f"input_{len(self.inputs)}")

    def _call(self, kind: Kind, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        self.kinds[node] = kind
        return node

    def _items(self, node: fx.Node, count: int) -> list[fx.Node]:
        return [self._call(Kind.NUMBER, operator.getitem, node, index) for index in range(count)]

    def _dense(self, rows: Sequence[int]) -> fx.Node:
        """A linear layer with a norm; the gradient of its weight."""
        call, width = self._call, rows[1]
        x, grad, weight, bias = (self._leaf(shape) for shape in (rows, rows, (width, width), (width,)))
        product = call(Kind.MATMUL, aten.addmm.default, bias, x, call(Kind.VIEW, aten.t.default, weight))
        active = call(Kind.FUNCTION, aten.tanh.default, product)
        total = call(Kind.POINTWISE, aten.add.Tensor, x, active)
        norm = call(Kind.NORM, aten.native_layer_norm.default, total, [width], bias, bias, 1e-5)
        out, mean, inverse = self._items(norm, 3)
        loss = call(Kind.REDUCTION, aten.mean.default, call(Kind.POINTWISE, aten.mul.Tensor, out, grad))
        call(Kind.IN_PLACE, aten.add_.Tensor, loss, 1.0)
        back = call(Kind.NORM_BACKWARD, aten.native_layer_norm_backward.default,
                    grad, total, [width], mean, inverse, bias, bias, [True] * 3)  # fmt: skip
        inner = call(Kind.POINTWISE, aten.tanh_backward.default, self._items(back, 3)[0], active)
        sums = call(Kind.REDUCTION, aten.sum.dim_IntList, inner, [0], True)
        call(Kind.VIEW, aten.view.default, sums, [width])
        onward = call(Kind.MATMUL, aten.mm.default, inner, weight)
        call(Kind.IN_PLACE, aten.add_.Tensor, onward, grad)
        return call(Kind.MATMUL, aten.mm.default, call(Kind.VIEW, aten.t.default, inner), x)

    def _image(self, image: Sequence[int]) -> fx.Node:
        """A convolution with batch norm; the gradient of its weight."""
        call, width = self._call, image[1]
        x, grad, weight = (self._leaf(shape) for shape in (image, image, (width, width, 3, 3)))
        scale, bias, mean, variance = (self._leaf([width]) for _ in range(4))
        product = call(Kind.CONVOLUTION, aten.convolution.default, x, weight, None, *_CONVOLUTION)
        norm = call(Kind.BATCH_NORM, aten.native_batch_norm.default,
                    product, scale, bias, mean, variance, True, 0.1, 1e-5)  # fmt: skip
        out, batch_mean, inverse = self._items(norm, 3)
        active = call(Kind.POINTWISE, aten.relu.default, out)
        inner = call(Kind.POINTWISE, aten.threshold_backward.default, grad, active, 0)
        back = call(Kind.NORM_BACKWARD, aten.native_batch_norm_backward.default,
                    inner, product, scale, mean, variance, batch_mean, inverse, True, 1e-5, [True] * 3)  # fmt: skip
        both = call(Kind.CONVOLUTION_BACKWARD, aten.convolution_backward.default,
                    self._items(back, 3)[0], x, weight, None, *_CONVOLUTION, [True, True, False])  # fmt: skip
        return self._items(both, 2)[1]

    def _attention(self, heads: Sequence[int], rows: Sequence[int]) -> fx.Node:
        """Attention and the end of a classifier; a gradient."""
        call = self._call
        x, grad = self._leaf(heads), self._leaf(rows)
        turned = call(Kind.VIEW, aten.transpose.int, x, 1, 2)
        out = call(Kind.ATTENTION, aten.scaled_dot_product_attention.default, turned, turned, turned, is_causal=True)
        dense = call(Kind.POINTWISE, aten.clone.default, out, memory_format=torch.contiguous_format)
        flat = call(Kind.VIEW, aten.view.default, dense, [-1, rows[1]])
        soft = call(Kind.SOFTMAX, aten._log_softmax.default, flat, 1, False)
        picked = call(Kind.VIEW, aten.slice.Tensor, soft, 0, 0, rows[0])
        wide = call(Kind.VIEW, aten.expand.default, call(Kind.VIEW, aten.unsqueeze.default, grad, 0), [1, *rows])
        inner = call(Kind.VIEW, aten.view.default, wide, rows)
        return call(Kind.SOFTMAX_BACKWARD, aten._log_softmax_backward_data.default, inner, picked, 1, torch.float32)

    def _update(self, grad: fx.Node, shape: Sequence[int]) -> None:
        """One parameter of AdamW, without lists."""
        call, rate = self._call, self._rate
        parameter, average, square = (self._leaf(shape) for _ in range(3))
        self._averages.append((average, square))
        correction = call(Kind.NUMBER, operator.sub, 1.0, call(Kind.NUMBER, operator.pow, rate, 7.0))
        stride = call(Kind.NUMBER, operator.truediv, rate, correction)
        call(Kind.IN_PLACE, aten.mul_.Tensor, parameter, 0.999)
        call(Kind.IN_PLACE, aten.lerp_.Scalar, average, grad, 0.1)
        call(Kind.IN_PLACE, aten.mul_.Tensor, square, 0.99)
        call(Kind.IN_PLACE, aten.addcmul_.default, square, grad, grad, value=0.01)
        root = call(Kind.POINTWISE, aten.sqrt.default, square)
        call(Kind.IN_PLACE, aten.div_.Tensor, root, correction)
        call(Kind.IN_PLACE, aten.add_.Tensor, root, 1e-8)
        opposite = call(Kind.NUMBER, operator.neg, stride)
        call(Kind.IN_PLACE, aten.addcdiv_.default, parameter, average, root, value=opposite)
