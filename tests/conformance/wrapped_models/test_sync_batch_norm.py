"""SyncBatchNorm in a compiled step: statistics of all ranks, with ranks that have more or fewer rows, or none."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.conformance.wrapped_models.against_eager import ddp, device
from tests.harness.rank_pools import Pool

row = functools.partial(pytest.mark.row, "S11")


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.Linear(6, 2))


def norm_alone() -> nn.Module:
    return nn.BatchNorm2d(2)


MODELS = {"small": small, "norm_alone": norm_alone}


def synchronised(model: nn.Module) -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(ddp(model)).train()


def train(model: Any, x: Tensor, needs_grad: bool) -> tuple[Tensor, Tensor | None]:
    """Output, and the gradient of the input where it takes one."""
    inputs = x.detach().requires_grad_(needs_grad)
    out = model(inputs)
    out.square().sum().backward()
    return out.detach(), inputs.grad


def without_nan(name: str, rows: tuple[int, int]) -> None:
    model, rank = synchronised(MODELS[name]()), ws.init().rank
    compiled = ws.compile(train, fullgraph=True)
    for needs_grad in (True, False):
        out, grad = compiled(model, torch.zeros(rows[rank], 2, 8, 8, device=device()), needs_grad)
        named = {"out": out, "grad": grad, **{fqn: one.grad for fqn, one in model.named_parameters()}}
        named |= dict(model.named_buffers())
        assert [fqn for fqn, one in named.items() if one is not None and one.isnan().any()] == []
        assert all(one.grad is not None for one in model.parameters())
        model.zero_grad()


@pytest.mark.parametrize("rows", [(0, 3), (0, 0)], ids=["one rank", "all ranks"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("norm_alone", marks=row("sync_batch_norm_only_empty_input")),
        pytest.param("small", marks=row("sync_batch_norm_empty_input")),
    ],
)
def test_an_empty_input_gives_no_nan(ranks2: Pool, name: str, rows: tuple[int, int]) -> None:
    ranks2.run(without_nan, name, rows)


def as_one_batch(rows: tuple[int, int]) -> int:
    model, rank = synchronised(small()), ws.init().rank
    local = copy.deepcopy(small()).to(device())
    compiled = ws.compile(train, fullgraph=True)
    torch.manual_seed(5)
    batches = [torch.randn(count, 2, 8, 8).to(device()) for count in rows]
    for _ in range(2):
        out, grad = compiled(model, batches[rank], True)
        wanted, wanted_grad = train(local, torch.cat(batches), True)
        assert wanted_grad is not None
        torch.testing.assert_close(out, wanted.split(list(rows))[rank], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grad, wanted_grad.split(list(rows))[rank], rtol=1e-4, atol=1e-4)
        for one, other in zip(model.parameters(), local.parameters(), strict=True):
            assert other.grad is not None
            torch.testing.assert_close(one.grad, other.grad / 2, rtol=1e-4, atol=1e-4)
        for one, other in zip(model.buffers(), local.buffers(), strict=True):
            torch.testing.assert_close(one, other)
        model.zero_grad()
        local.zero_grad()
    return compiled.cache_info().traces


@row("sync_batch_norm_empty_input")
@pytest.mark.parametrize("rows", [(3, 3), (0, 3), (2, 3)])
def test_statistics_and_gradients_are_those_of_one_batch(ranks2: Pool, rows: tuple[int, int]) -> None:
    assert ranks2.run(as_one_batch, rows) == [1, 1]
