"""One training of the table, on every rank of a gloo group: what differs from eager DistributedDataParallel."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import wholestep as ws
from benchmarks.sharded_trainings.models import MODELS
from wholestep.config import Strategy
from wholestep.ir import op_info

CALLS = 5
_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")


@dataclass(frozen=True, slots=True)
class Way:
    """A strategy, and over how many ranks."""

    strategy: Strategy
    num_ranks: int = 2
    mesh: tuple[int, int] | None = None
    """Replicas and shards, if they are two axes."""


_BUCKET_BYTES = 2_000
"""So that there are several."""
WAYS: dict[str, Way] = {
    "ZeRO-1": Way(ws.ZeRO(bucket_bytes=_BUCKET_BYTES)),
    "ZeRO-2": Way(ws.ZeRO(stage=2, bucket_bytes=_BUCKET_BYTES)),
    "FSDP, kept": Way(ws.FSDP(reshard_after_forward=False, bucket_bytes=_BUCKET_BYTES)),
    "FSDP, gathered again": Way(ws.FSDP(reshard_after_forward=True, bucket_bytes=_BUCKET_BYTES)),
    "HSDP 2x2": Way(ws.FSDP(bucket_bytes=_BUCKET_BYTES), 4, (2, 2)),
}
_EPS = 1e-4
"""Above the rounding of gradients that would be 0 (biases before BatchNorm, of keys): AdamW divides by it."""
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3, eps=_EPS),
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3, eps=_EPS, fused=True),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One training, by the names of its parts."""

    way: str
    model: str
    optimizer: str
    clips: bool
    accumulates: bool

    def __str__(self) -> str:
        told = [self.way, self.model, self.optimizer, *["clip"] * self.clips, *["accumulate"] * self.accumulates]
        return ", ".join(told)


CELLS = tuple(itertools.starmap(Cell, itertools.product(WAYS, MODELS, OPTIMIZERS, (False, True), (False, True))))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one."""

    faults: tuple[str, ...]
    """What is farther from the reference than rounding explains; notes of `explain().fallbacks`; errors."""
    is_bitwise: bool
    collectives: dict[str, int]
    """Of the step's program, by operator."""

    @property
    def kinds(self) -> dict[str, int]:
        """The collectives by kind, whatever the operator that does it."""
        found: Counter[str] = Counter()
        for name, number in self.collectives.items():
            found[next(kind for kind in _KINDS if name.startswith(kind))] += number
        return dict(found)


def train_step(model: Any, opt: Optimizer, x: Tensor, y: Tensor, cell: Cell) -> Tensor:
    """One update, of two micro-batches if it accumulates."""
    parts = 2 if cell.accumulates else 1
    losses = []
    for number, (one, wanted) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
        with _without_reduction(model) if number < parts - 1 else nullcontext():
            loss = model(one, wanted) / parts
            loss.backward()
        losses.append(loss.detach())
    if cell.clips:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    opt.step()
    opt.zero_grad()
    return torch.stack(losses).sum()


def _without_reduction(model: Any) -> AbstractContextManager[None]:
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def run(cell: Cell) -> Outcome:
    """The outcome of a training on this rank, under the strategy of its way. Called on every rank."""
    way = WAYS[cell.way]
    mesh = None if way.mesh is None else init_device_mesh("cpu", way.mesh, mesh_dim_names=("dp_replicate", "dp_shard"))
    return outcome(cell, way.strategy, mesh)


def outcome(cell: Cell, strategy: Strategy, mesh: DeviceMesh | None) -> Outcome:
    """Five calls of the compiled step and of eager DistributedDataParallel on the same data."""
    model, opt = _training(cell)
    reference, reference_opt = _training(cell)
    wrapped = DistributedDataParallel(reference)
    step = ws.compile(train_step, strategy=strategy, mesh=mesh, backend="eager", fullgraph=True)
    compared: dict[str, tuple[Tensor, Tensor]] = {}
    for call in range(CALLS):
        batch = MODELS[cell.model].batch(dist.get_rank(), call)
        want = train_step(wrapped, reference_opt, *batch, cell)
        compared[f"loss of call {call}"] = want, step(model, opt, *batch, cell)
    compared |= _state(reference, reference_opt, model, opt)
    faults = [name for name, (want, came) in compared.items() if not _is_close(want, came)]
    faults += [str(one) for one in step.program().fallbacks]
    info = step.cache_info()
    if info.traces + info.loaded != 1:
        faults.append(f"traced {info.traces} times, and loaded {info.loaded} times")
    nodes = filter(op_info.is_collective, step.program().graph.nodes)
    return Outcome(
        tuple(faults), all(itertools.starmap(torch.equal, compared.values())),
        dict(Counter(str(node.target).split(".")[1].rstrip("_") for node in nodes)),
    )  # fmt: skip


def _training(cell: Cell) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = MODELS[cell.model].make()
    return model, OPTIMIZERS[cell.optimizer]([one for one in model.parameters() if one.requires_grad])


def _state(
    model: nn.Module, opt: Optimizer, other: nn.Module, other_opt: Optimizer
) -> dict[str, tuple[Tensor, Tensor]]:
    """Parameters, buffers and optimizer state of two trainings, side by side."""
    found = {}
    for (name, want), came in zip(model.named_parameters(), other.parameters(), strict=True):
        found[name] = want.detach(), _whole(came)
        for key, held in opt.state.get(want, {}).items():
            found[f"{key} of {name}"] = held, _whole(other_opt.state[came][key])
    if dist.get_rank() == 0:  # the other ranks have statistics of their own until the next forward
        found |= {n: (one, _whole(came)) for (n, one), came in zip(model.named_buffers(), other.buffers(), strict=True)}
    return found


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _is_close(want: Tensor, came: Tensor) -> bool:
    """Sums over ranks and of the norm have another order, and AdamW divides by roots of small numbers."""
    eps = 2**5 * torch.finfo(torch.float32).eps
    return want.shape == came.shape and torch.allclose(want, came, rtol=eps, atol=eps)
