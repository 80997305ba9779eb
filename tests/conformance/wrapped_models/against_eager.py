"""One training run twice, by its own Python and compiled: results, gradients and buffers are equal after each call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from tests.harness.equality import equal
from wholestep.ir import node_meta
from wholestep.ir.node_meta import Bucket, BucketKind

Step = Callable[..., Any]


def device() -> torch.device:
    """Of this rank: the CPU under gloo, its GPU under NCCL."""
    return ws.init().device


def ddp(module: nn.Module, **settings: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module.to(device()), **settings)


def rank_seed(number: int) -> None:
    """Other numbers on each rank."""
    torch.manual_seed(100 * number + ws.init().rank)


def forward_and_backward(model: Any, *inputs: Any) -> Tensor:
    out: Tensor = model(*inputs)
    out.sum().backward()
    return out.detach()


def inference(model: Any, *inputs: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(*inputs)
    return out


def against_eager(
    build: Callable[[], Any],
    step: Step,
    batches: Sequence[tuple[Any, ...]],
    backend: Any = "auto",
    *,
    computed: torch.dtype | None = None,
) -> ws.CompiledStep:
    """Calls `step(module, *batch)` for each batch, eagerly and as one graph, on modules that `build` makes alike.

    `build` makes the module the second time with the same random numbers. Gradients are dropped between calls.
    `computed`: the type of products, where it is not that of the parameters.
    """
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(build())
    eager, ours = made
    compiled = ws.compile(step, fullgraph=True, backend=backend)
    for number, batch in enumerate(batches):
        rank_seed(number)
        expected = step(eager, *batch)
        rank_seed(number)
        given = compiled(ours, *batch)
        expect_equal(f"result {number}", expected, given, computed)
        expect_equal(f"state {number}", state(eager), state(ours), computed)
        eager.zero_grad()
        ours.zero_grad()
    return compiled


def state(model: nn.Module) -> dict[str, Any]:
    return {
        **{f"{name}.grad": one.grad for name, one in model.named_parameters()},
        **dict(model.named_buffers()),
    }


def expect_equal(name: str, wanted: Any, got: Any, computed: torch.dtype | None = None) -> None:
    """In every bit on CPUs; on GPUs up to the order in which kernels add."""
    if isinstance(wanted, dict):
        assert wanted.keys() == got.keys(), name
        for key in wanted:
            expect_equal(f"{name}.{key}", wanted[key], got[key], computed)
    elif isinstance(wanted, (list, tuple)):
        assert len(wanted) == len(got), name
        for index, (one, other) in enumerate(zip(wanted, got, strict=True)):
            expect_equal(f"{name}[{index}]", one, other, computed)
    elif dataclasses.is_dataclass(wanted):
        assert type(wanted) is type(got), name
        expect_equal(name, vars(wanted), vars(got), computed)
    else:
        one, other = _part(wanted), _part(got)
        assert equal(one, other, computed), f"{name}: {_difference(one, other)}"


def _difference(wanted: Any, got: Any) -> str:
    if isinstance(wanted, Tensor) and isinstance(got, Tensor) and wanted.shape == got.shape:
        return f"differs by up to {(wanted - got).abs().max():.3g} of {wanted.abs().max():.3g}"
    return f"{got} instead of {wanted}"


def _part(one: Any) -> Any:
    one = one.to_local() if isinstance(one, DTensor) else one
    return one.detach().to_dense() if isinstance(one, Tensor) and one.is_sparse else one


def buckets(compiled: ws.CompiledStep) -> list[tuple[str, ...]]:
    """Names of the parameters whose gradients travel as one, per message of gradients."""
    return [one.members for one in _messages(compiled)]


def bucket_bytes(compiled: ws.CompiledStep) -> list[int]:
    """How many bytes each of them has."""
    return [one.num_bytes for one in _messages(compiled)]


def _messages(compiled: ws.CompiledStep) -> list[Bucket]:
    found = (node_meta.bucket(node) for node in compiled.graph.graph.nodes)
    return [one for one in found if one is not None and one.kind is not BucketKind.GATHER]
