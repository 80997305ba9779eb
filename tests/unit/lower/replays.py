"""Steps of several pieces on the CPU: a graph is a function of the memory that was there when it was captured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.unit.builders import aten
from tests.unit.lower.gpu_programs import Spec, gpu, host, scheduled
from wholestep.ir.program import InputKind, Output, OutputKind, Program
from wholestep.lower.base import eager_backend
from wholestep.lower.cudagraph.graph_pool import Pool
from wholestep.lower.cudagraph.graph_runner import GraphRunner
from wholestep.lower.cudagraph.partition import Partition, partition


class Replays(Pool):
    """A pool whose graphs run on the CPU. What they leave is nan until they have run."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.calls: list[str] = []
        """What ran, in order."""
        self._captured_calls: list[tuple[Callable[..., Any], list[Any], Any]] | None = None

    def lower(self, part: Program) -> Callable[[list[Any]], tuple[Any, ...]]:
        run = eager_backend.lower(part)

        def step(inputs: list[Any]) -> tuple[Any, ...]:
            if self._captured_calls is None:
                self.calls.append("run")
                return run(inputs)
            tensors = [one for one in inputs if isinstance(one, Tensor)]
            before = [one.clone() for one in tensors]
            outputs = run(list(inputs))
            for one, value in zip(tensors, before, strict=True):
                one.copy_(value)
            kept = {one.untyped_storage().data_ptr() for one in tensors}
            for one in filter(_is_tensor, outputs):
                if one.untyped_storage().data_ptr() not in kept:
                    one.fill_(math.nan)
            self._captured_calls.append((run, inputs, outputs))
            return outputs

        return step

    def capture(self, body: Callable[[], Any], rewound: Any = None) -> tuple[Any, Any]:
        self._captured_calls, pool = [], self
        self.calls.append("capture")
        CAPTURING.append(True)
        try:
            results = body()
            ((run, inputs, outputs),) = self._captured_calls
        finally:
            del CAPTURING[:]
            self._captured_calls = None

        class Graph:
            def replay(self) -> None:
                pool.calls.append("replay")
                for old, new in zip(outputs, run(list(inputs)), strict=True):
                    if _is_tensor(old) and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                        old.untyped_storage().copy_(new.untyped_storage())

            def reset(self) -> None:
                pool.calls.append("reset")

        return Graph(), results


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)  # and no size


CAPTURING: list[bool] = []
"""Holds something while a pool captures."""


@torch.library.custom_op("wholestep_unit_tests::waits", mutates_args=())
def waits(x: Tensor) -> Tensor:
    """What looks at a number inside does while CUDA captures."""
    if CAPTURING:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")
    return x * 2


@waits.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("wholestep_unit_tests::breaks", mutates_args=())
def breaks(x: Tensor) -> Tensor:
    """Has no memory for a capture."""
    if CAPTURING:
        raise torch.OutOfMemoryError("no memory, with so much of it in private pools that captures have")
    return x * 2


@breaks.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def layers(x: Tensor) -> Tensor:
    for scale in (0.5, 0.25, 2.0, 1.0):
        x = (x @ x) * scale
    return x


def number_between(x: Tensor) -> tuple[Any, ...]:
    y = layers(x)
    return layers(y * y.sum().item()), y


def two_numbers(x: Tensor) -> tuple[Any, ...]:
    y = layers(x)
    z = layers(y + y.sum().item())
    return layers(z * z.amax().item()), z.amin().item(), y


def sizes(x: Tensor) -> tuple[Any, ...]:
    y = layers(x)
    return layers(y + aten.nonzero.default(y.relu()).sum()), y


def trains(w: Tensor, g: Tensor, x: Tensor, rate: Tensor) -> tuple[Any, ...]:
    g.add_(layers(w * x))
    norm = g.norm().item()
    w.sub_(layers(g) * (rate.item() / (1 + norm)))
    x.mul_(2)
    return layers(w), norm, w.sum()


def views(x: Tensor) -> tuple[Any, ...]:
    """What is computed outside of a graph is read in two ways after it."""
    y = layers(x)
    z = y * y.sum().item()
    flat = z.view(-1)
    u = layers(z)
    return u.add(flat.sum()), flat, layers(u + z.t())


def updates_twice(w: Tensor, x: Tensor) -> tuple[Any, ...]:
    """A parameter is written outside of a graph, and after that within one."""
    y = layers(w * x)
    w.add_(y.sum().item())
    w.mul_(layers(x))
    return y, w.sum()


PARAM, GRAD = InputKind.PARAM, InputKind.GRAD
STEPS: dict[str, tuple[Callable[..., Any], list[Spec], int]] = {
    "one graph": (layers, [gpu(3, 3)], 1),
    "a number in the middle": (number_between, [gpu(3, 3)], 2),
    "two numbers": (two_numbers, [gpu(3, 3)], 3),
    "a size that is data": (sizes, [gpu(3, 3)], 2),
    "a parameter written twice": (updates_twice, [gpu(3, 3, kind=PARAM), gpu(3, 3)], 2),
    "views across pieces": (views, [gpu(3, 3)], 2),
    "a training step": (trains, [gpu(3, 3, kind=PARAM), gpu(3, 3, kind=GRAD), gpu(3, 3), host()], 3),
}  # fmt: skip


def tensors_for(specs: list[Spec], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(shape, dtype=dtype, generator=generator) for shape, dtype, _, _ in specs]


def same(found: Sequence[Any], wanted: Sequence[Any]) -> bool:
    """Whether tensors, numbers and what is None because it was written in place are the same bits."""
    return all(
        torch.equal(one, other) if isinstance(one, Tensor) else one == other
        for one, other in zip(found, wanted, strict=True)
    )


def graphed_of(program: Program, pool: Replays, refused: dict[Any, str] | None = None) -> GraphRunner:
    parts = partition(program, refused := {} if refused is None else refused)
    assert isinstance(parts, Partition), parts
    return GraphRunner(program, parts, pool.lower, pool, refused=refused)


def leaves(fn: Callable[..., Any], pool: Replays, *, num_params: int = 2, **more: Any) -> GraphRunner:
    """A step that gives its first inputs, parameters, the first results of `fn` as gradients."""
    specs = [*[gpu(3, 3, kind=PARAM)] * num_params, gpu(3, 3)]
    program = scheduled(fn, *specs, segments=False)
    outputs = [Output(kind=OutputKind.GRAD, name=f"x{number}", target=number) for number in range(num_params)]
    program = replace(program, outputs=(*outputs, *program.outputs[num_params:]), **more)
    return graphed_of(program, pool)


def two_grads(v: Tensor, w: Tensor, x: Tensor) -> tuple[Any, ...]:
    y = layers(v @ x)
    return y, layers(w @ y), y.sum()


def trained(graphed: GraphRunner, params: list[nn.Parameter], x: Tensor) -> tuple[Any, ...]:
    """A call, after which parameters have their new gradients; the other results."""
    grads = graphed([*params, x])
    for param, grad in zip(params, grads, strict=False):
        param.grad = grad
    return grads[len(params) :]


def parameters(count: int = 2) -> list[nn.Parameter]:
    return [nn.Parameter(one) for one in tensors_for([gpu(3, 3)] * count, 1)]
