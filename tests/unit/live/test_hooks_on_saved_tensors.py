"""Calls that wait to run were made without hooks on saved tensors, and without weights that torch keeps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm
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


def cached_where(wanted: bool) -> AbstractContextManager[None]:
    return parametrize.cached() if wanted else nullcontext()


def trained_with_kept_weights(kind: str, compiled: Callable[[Any], Any]) -> list[Any]:
    """Each time that the weight is computed is seen in what the normalization has counted."""
    torch.manual_seed(0)
    model = nn.Sequential(spectral_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 3))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    calls: list[int] = []

    def step(x: Tensor) -> Tensor:
        if kind != "around, a graph":
            calls.append(len(calls))
        loss = model(x).square().mean() if kind == "read inside" else torch.zeros(())
        with cached_where(kind in ("inside", "read inside") or (kind == "by turns" and len(calls) % 3 == 0)):
            if kind == "read inside" and loss > 100:
                return loss
            loss = loss + (model(x) + model(x * 0.5)).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    run, generator = compiled(step), torch.Generator().manual_seed(1)
    seen: list[Any] = []
    for call in range(9):
        with cached_where(kind.startswith("around") and call % 3 == 1):
            seen.append(repr(run(torch.randn(2, 4, generator=generator))))
            seen += [type(one) for one in parametrize._cache.values()]
        seen += [repr(one) for one in model.state_dict().values()]
    return seen


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize("kind", ["inside", "by turns", "read inside", "around", "around, a graph"])
def test_parametrized_weights_that_torch_keeps_are_computed_once(kind: str, may_go_live: bool) -> None:
    """No fake weight is left in torch's cache, and what waited computes its own."""
    eager = trained_with_kept_weights(kind, lambda step: step)
    assert trained_with_kept_weights(kind, lambda step: ws.compile(step, backend="eager")) == eager
