"""Recurrent layers on a GPU: as eager code trains them, in one CUDA graph."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws

pytestmark = pytest.mark.gpu

STEPS, WIDTH = 8, 32


class Net(nn.Module):
    """(rows, length, width) -> (rows, 5)."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.inner = kind(WIDTH, WIDTH, num_layers=2, batch_first=True, bidirectional=kind is nn.GRU)
        self.head = nn.Linear(WIDTH * (1 + (kind is nn.GRU)), 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x)[0][:, -1])  # type: ignore[no-any-return]


def train_step(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def train(kind: type[nn.RNNBase], step: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    model = Net(kind).to("cuda", dtype)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(16, 7, WIDTH, device="cuda", dtype=dtype), torch.arange(16, device="cuda") % 5
    losses = [step(model, opt, x, y) for _ in range(STEPS)]
    return [*losses, *model.parameters()]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_they_train_as_eager_code_does(kind: type[nn.RNNBase], caplog: pytest.LogCaptureFixture) -> None:
    step = ws.compile(train_step, backend="inductor")
    with caplog.at_level(logging.WARNING, logger="wholestep"):
        found = train(kind, step, torch.float64)
    assert sum("step by step" in one.getMessage() for one in caplog.records) == 1
    assert "one CUDA graph" in step.explain().backend
    for one, other in zip(found, train(kind, train_step, torch.float64), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
