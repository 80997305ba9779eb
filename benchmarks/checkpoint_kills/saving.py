"""What ranks do until they are killed: save again and again into one folder, all values the number of the save."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import wholestep as ws

WIDTH, LAYERS = 64, 6


class Count:
    """How many checkpoints there were, as something that has a state."""

    def __init__(self) -> None:
        self.number = 0

    def state_dict(self) -> dict[str, Any]:
        """The number."""
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from it."""
        self.number = state["number"]


def training() -> tuple[nn.Module, Optimizer]:
    """A model and an optimizer that has state."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for param in model.parameters():
        optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)
    return model, optimizer


def tensors(model: nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
    """All that is saved, but for numbers."""
    params = [*model.parameters()]
    return [*params, *(optimizer.state[param]["momentum_buffer"] for param in params)]


def save_until_killed(path: Path, told: Path, asynchronous: bool) -> None:
    """Goes on where the folder stands. After each save rank 0 writes its number to the file `told`."""
    world = ws.init()
    model, optimizer = training()
    ws.shard(model, optimizer, strategy=ws.FSDP())
    count = Count()
    if path.exists() or any(path.parent.glob(f".{path.name}.*.whole")):
        ws.load_checkpoint(path, model, optimizer, extra={"count": count})
    while True:
        count.number += 1
        with torch.no_grad():
            for tensor in tensors(model, optimizer):
                tensor.fill_(count.number)
        ws.save_checkpoint(path, model, optimizer, extra={"count": count}, asynchronous=asynchronous).result()
        if world.rank == 0:
            beside = told.with_suffix(".new")
            beside.write_text(str(count.number))
            os.replace(beside, told)


def number_in(path: Path) -> int | None:
    """The number of the checkpoint in a folder, read by one process; None if its values are of several saves."""
    model, optimizer = training()
    count = Count()
    ws.load_checkpoint(path, model, optimizer, extra={"count": count})
    whole = all(bool((tensor == count.number).all()) for tensor in tensors(model, optimizer))
    return count.number if whole else None
