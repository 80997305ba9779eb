"""Modules that are wrapped already: names without wrappers, and the memory of a hook for communication."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from tests.ranks.checkpoint.training import Net, Setup, Training, adamw, differences, rank, train_step, training, values

pytestmark = pytest.mark.ranks

FSDP = Setup(ws.FSDP(), 2)


def wrapped(kind: str, seed: int) -> tuple[Any, Training]:
    """The wrapper, and the training with what is inside."""
    torch.manual_seed(seed)
    model: Any = Net()
    outer = model
    if kind == "fully_shard":
        model.scale.requires_grad_(False)  # fully_shard takes no numbers
        fully_shard(model, ignored_params={model.scale, model.frozen})
    else:
        outer = DistributedDataParallel(model)
    if kind == "powersgd":
        state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5)
        outer.register_comm_hook(state, powerSGD_hook)
    torch.manual_seed(100 * seed + rank())
    step = ws.compile(train_step, backend="eager", fullgraph=True)
    return outer, Training(outer, adamw(model), step)


def inside(outer: Any, one: Training) -> dict[str, Tensor]:
    model = outer.module if isinstance(outer, DistributedDataParallel) else outer
    return values(Training(model, one.opt, one.step))


def shared(kind: str, names: list[str]) -> list[str]:
    """Without buffers where each rank has its own: a checkpoint has those of rank 0."""
    return [name for name in names if kind != "fully_shard" or "running" not in name]


def resumed(kind: str, path: Path) -> tuple[list[str], int, list[str]]:
    """What differs from a training that goes on, captures between calls, and what differs in one with our strategy."""
    outer, one = wrapped(kind, 1)
    one.run(4)
    one.save(path)
    saved = inside(outer, one)
    want = [float(loss) for loss in one.run(3, first=4)], inside(outer, one)
    one.load(path)
    again = [float(loss) for loss in one.run(3, first=4)]
    other_outer, other = wrapped(kind, 2)
    other.load(path)
    losses = [float(loss) for loss in other.run(3, first=4)]
    faults = shared(kind, differences(want[1], inside(other_outer, other)))
    faults += [] if want[0] == losses == again else [f"{want[0]} {again} {losses}"]
    plain = training(FSDP, seed=3)
    plain.load(path)
    differ = shared("fully_shard", differences(saved, values(plain)))
    return faults, one.step.cache_info().traces, differ


@pytest.mark.parametrize("kind", ["ddp", "powersgd", "fully_shard"])
def test_a_wrapped_training_is_resumed(pool2: Any, tmp_path: Path, kind: str) -> None:
    assert pool2.run(resumed, kind, tmp_path / "run") == [([], 1, [])] * 2
