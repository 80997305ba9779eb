"""Modules of ``parallelize_module`` in a compiled step: one graph with their communication, equal to eager training."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws

pytestmark = pytest.mark.ranks

SGD: Any = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
OPTIMIZERS: dict[str, Any] = {
    "sgd": SGD,
    "sgd-damped": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1),
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "adamw-fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "adamw-foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
}


class MLP(nn.Module):
    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, size), nn.Linear(size, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.relu(self.up(x)))
        return hidden


class Block(nn.Module):
    """Residual, over parts of the sequence: norms between two MLPs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mlp, self.last = nn.LayerNorm(8), MLP(), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.mlp(self.first(x)))  # type: ignore[no-any-return]


class Language(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.words, self.mlp, self.head = nn.Embedding(12, 8), MLP(), nn.Linear(8, 12, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mlp(self.words(tokens)))  # type: ignore[no-any-return]


def two_ranks() -> DeviceMesh:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def mlp(size: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return parallelize_module(MLP(size), two_ranks(), {"up": ColwiseParallel(), "down": RowwiseParallel()})


def sequence() -> nn.Module:
    torch.manual_seed(0)
    plan = {
        "first": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "last": SequenceParallel(),
    }
    whole = {"": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),))}
    return parallelize_module(parallelize_module(Block(), two_ranks(), plan), two_ranks(), whole[""])


def language(head: Any, *, tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    plan = {
        "words": RowwiseParallel(input_layouts=Replicate()), "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(), "head": head,
    }  # fmt: skip
    return parallelize_module(Language(tied=tied), two_ranks(), plan)


def loss_of(model: Any, x: Tensor) -> Tensor:
    out = model(x)
    out = out.full_tensor() if isinstance(out, DTensor) else out
    return out.square().mean() if out.is_floating_point() else out


def clear_last(model: Any, opt: Any, x: Tensor, clip: float | None = None) -> Tensor:
    loss = loss_of(model, x)
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    opt.step()
    opt.zero_grad()
    return loss.detach()


def clear_first(model: Any, opt: Any, x: Tensor, clip: float | None = None) -> Tensor:
    opt.zero_grad()
    loss = loss_of(model, x)
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    opt.step()
    return loss.detach()


def batch(number: int, *shape: int) -> Tensor:
    """The same on both ranks: they divide the work on one batch."""
    torch.manual_seed(number)
    return torch.randn(*(shape or (4, 6, 8)))


def words(number: int) -> Tensor:
    torch.manual_seed(number)
    return torch.randint(0, 12, (4, 6))


def pieces(one: Any) -> Any:
    """What of a tensor has to be equal."""
    return (one.placements, tuple(one.shape), one.to_local()) if isinstance(one, DTensor) else (None, None, one)


def same(one: Any, other: Any) -> bool:
    """Whether two tensors have the same bits on this rank, and are placed alike."""
    if one is None or other is None:
        return one is other
    (placed, shape, local), (others_placed, others_shape, others_local) = pieces(one), pieces(other)
    return placed == others_placed and shape == others_shape and torch.equal(local, others_local)


def held(model: Any, opt: Any) -> list[Any]:
    """Parameters, gradients and optimizer state."""
    params = list(model.parameters())
    state = [leaf for one in params for _, leaf in sorted(opt.state[one].items()) if isinstance(leaf, Tensor)]
    return [*params, *(one.grad for one in params), *state]


def equal_to_eager(
    make: Callable[[], Any], optimizer: Any, step: Any, data: Callable[[int], Tensor] = batch, **options: Any
) -> tuple[int, list[str]]:
    """Bitwise over five calls, one of them with another rate; the number of traces, and the collectives of the plan."""
    eager, model = make(), make()
    opt, own = optimizer(eager.parameters()), optimizer(model.parameters())
    compiled = ws.compile(step, fullgraph=True, **options)
    for number in range(5):
        for group in (*opt.param_groups, *own.param_groups):
            group["lr"] = 0.1 if number == 3 else 0.01
        assert same(compiled(model, own, data(number)), step(eager, opt, data(number))), number
        pairs = list(zip(held(eager, opt), held(model, own), strict=True))
        assert [place for place, pair in enumerate(pairs) if not same(*pair)] == [], number
    assert any(isinstance(one, DTensor) for one in model.parameters())
    return compiled.cache_info().traces, collectives(compiled.plan)


def collectives(plan: str) -> list[str]:
    return [line.split()[1] for line in plan.splitlines() if line.startswith("#")]


def calls_of_eager_code(make: Callable[[], Any], step: Any, x: Tensor) -> int:
    """How many collectives one eager call has."""
    model = make()
    with CommDebugMode() as communication:
        step(model, SGD(model.parameters()), x)
    return int(communication.get_total_counts())
