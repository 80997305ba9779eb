"""Calls that wait to run were made without the hooks on saved tensors that are set when they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import wholestep as ws

Around = Callable[[Tensor, list[tuple[int, ...]]], Tensor]


def by_hooks(out: Tensor, packed: list[tuple[int, ...]]) -> Tensor:
    def pack(tensor: Tensor) -> Tensor:
        packed.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return out.tanh().mean()


def by_checkpoint(out: Tensor, packed: list[tuple[int, ...]]) -> Tensor:
    found: Tensor = checkpoint(torch.tanh, out, use_reentrant=False).mean()
    return found


def trained(around: Around, compiled: Callable[[Any], Any]) -> tuple[list[str], list[tuple[int, ...]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.25), nn.Linear(4, 3))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    packed: list[tuple[int, ...]] = []

    def step(batch: Tensor) -> Tensor | None:
        for x in batch.chunk(2):
            out = model(x)
            loss = out.square().mean()
            if int(out.argmax()) % 2:
                return None
            loss = loss + around(out, packed)
            loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    run, generator = compiled(step), torch.Generator().manual_seed(1)
    return [repr(run(torch.randn(2, 4, generator=generator))) for _ in range(12)], packed


@pytest.mark.parametrize("around", [by_hooks, by_checkpoint])
def test_what_waited_is_not_seen_by_hooks(around: Around) -> None:
    assert trained(around, lambda step: ws.compile(step, backend="eager")) == trained(around, lambda step: step)
