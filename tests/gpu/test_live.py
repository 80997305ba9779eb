"""Live steps on a GPU: pieces as CUDA graphs, values asked for between them.

In float64, where a difference is a fault and no rounding; autocast computes in bfloat16, whose unit roundoff is 2^-8.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholestep as ws

pytestmark = pytest.mark.gpu

CALLS = 12


@pytest.fixture
def may_go_live() -> bool:
    """Whether steps that a test compiles may go live."""
    return True


class Training:
    """A model on the GPU, its optimizer, a schedule and a log."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 8)).cuda().double()
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.opt, 3, 0.5)
        self.log: list[Any] = []

    def update(self, loss: Tensor) -> None:
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.opt.step()
        self.schedule.step()
        self.opt.zero_grad()


def appends(t: Training, x: Tensor, y: Tensor, scale: Tensor) -> None:
    loss = F.cross_entropy(t.model(x), y) * scale
    t.update(loss)
    t.log.append(loss.item())


def guards(t: Training, x: Tensor, y: Tensor, scale: Tensor) -> None:
    loss = F.cross_entropy(t.model(x), y) * scale
    if not math.isfinite(loss.item()):
        t.log.append("skipped")
        return
    t.update(loss)
    t.log.append(float(loss))


def guards_the_update(t: Training, x: Tensor, y: Tensor, scale: Tensor) -> None:
    loss = F.cross_entropy(t.model(x), y) * scale
    loss.backward()
    norm = nn.utils.clip_grad_norm_(t.model.parameters(), 1.0)
    if torch.isfinite(norm):
        t.opt.step()
    t.opt.zero_grad()
    t.log.append(norm.item())


def looks_at_logits(t: Training, x: Tensor, y: Tensor, scale: Tensor) -> None:
    logits = t.model(x)
    t.log.append((logits.argmax(1) == y).float().mean().cpu().numpy().item())
    t.update(F.cross_entropy(logits, y))


def keeps_tensors(t: Training, x: Tensor, y: Tensor, scale: Tensor) -> None:
    loss = F.cross_entropy(t.model(x), y) * scale
    t.update(loss)
    t.log.append(loss.detach())


def masks(t: Training, x: Tensor, y: Tensor, scale: Tensor) -> None:
    logits = t.model(x)
    t.update(F.cross_entropy(logits[y > 2], y[y > 2]))


def autocasts(t: Training, x: Tensor, y: Tensor, scale: Tensor) -> None:
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.cross_entropy(t.model(x), y)
    t.update(loss)
    t.log.append(loss.item())


STEPS = [appends, guards, guards_the_update, looks_at_logits, keeps_tensors, masks, autocasts]


def batch(call: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, classes, and a factor of the loss, which is infinite in one call."""
    generator = torch.Generator().manual_seed(call)
    x, y = torch.randn(16, 32, generator=generator), torch.randint(8, (16,), generator=generator)
    scale = torch.tensor(math.inf if call == 6 else 1.0, dtype=torch.float64)
    return x.cuda().double(), y.cuda(), scale.cuda()


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_it_trains_as_eager_code_does(step: Callable[..., None], backend: Any) -> None:
    eager, live = Training(), Training()
    compiled = ws.compile(lambda *batch: step(live, *batch), backend=backend)
    for call in range(CALLS):
        given = batch(call) if step in (guards, guards_the_update) else batch(min(call, 5))
        step(eager, *given)
        compiled(*given)
    bounds = {"rtol": 0.0, "atol": 2.0**-8 if step is autocasts else 1e-9, "equal_nan": True}
    torch.testing.assert_close(live.model.state_dict(), eager.model.state_dict(), **bounds)
    for one, other in zip(live.log, eager.log, strict=True):
        if not isinstance(other, str):
            torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other), **bounds)
        else:
            assert one == other
    assert compiled.explain().live is not None
