"""Cross-entropy and its gradient by one kernel, on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wholestep as ws
from wholestep.lower.kernels.cross_entropy import _FEWEST_CLASSES, cross_entropy

pytestmark = pytest.mark.gpu

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
IGNORED = -100


def drawn(rows: int, classes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    draw = torch.Generator("cuda").manual_seed(0)
    logits = 3 * torch.randn(rows, classes, generator=draw, device="cuda")
    target = torch.randint(classes, (rows,), generator=draw, device="cuda")
    target[1::7] = IGNORED
    return logits.to(dtype), target


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize(("rows", "classes"), [(1000, 50304), (700, 50257), (5, 128_256), (3000, 10)])
def test_losses_and_gradients_are_those_of_float64(rows: int, classes: int, dtype: torch.dtype) -> None:
    logits, target = drawn(rows, classes, dtype)
    losses, gradient = cross_entropy(logits, target, torch.tensor(0.3, device="cuda"), IGNORED)
    leaf = logits.double().requires_grad_()
    exact = F.cross_entropy(leaf, target, reduction="none")
    (0.3 * exact).sum().backward()
    # As in `tests/unit/lower/kernels/test_cross_entropy.py`, but sums of as many numbers as a contender and a tree of
    # contenders add.
    room = 8 * UNIT[torch.float32] * (2 * float(logits.abs().max()) + 200)
    torch.testing.assert_close(losses.double(), exact.detach(), rtol=0.0, atol=room)
    # A chance is as far off, relative to it; that of the answer loses what it has in common with one.
    chances = torch.softmax(logits.double(), 1)
    far = (gradient.double() - leaf.grad).abs() - (2 * UNIT[dtype] * leaf.grad.abs() + 0.3 * room * chances)
    assert float(far.max()) <= 2.0**-25
    again = cross_entropy(logits, target, torch.tensor(0.3, device="cuda"), IGNORED)
    assert torch.equal(losses, again[0])
    assert torch.equal(gradient, again[1])


class Head(nn.Module):
    """(rows, 64) -> (rows, classes)."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(64, 64)
        self.head = nn.Linear(64, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.body(x)))


def train_step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.cross_entropy(model(x).float(), y)  # without the cast autocast has logarithms in bfloat16
    loss.backward()
    return loss.detach()


def names(step: Callable[[], Any]) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    return [one.name for one in profile.events()]


@pytest.mark.parametrize("classes", [5056, 5008, 5003])
@pytest.mark.parametrize("graph", [True, False])
def test_a_step_runs_one_kernel(graph: bool, classes: int) -> None:
    draw = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(4096, 64, generator=draw, device="cuda")
    y = torch.randint(classes, (4096,), generator=draw, device="cuda")
    y[::5] = IGNORED
    step = ws.compile(train_step, backend=ws.Inductor(cuda_graph="auto" if graph else False))
    ours, eager, exact = (Head(classes).cuda() for _ in range(3))
    for _ in range(4):
        found = step(ours, x, y)
    wanted = train_step(eager, x, y)
    loss = F.cross_entropy(exact(x), y)
    loss.backward()
    torch.testing.assert_close(found, wanted, rtol=2.0**-12, atol=0.0)
    for one, other, true in zip(ours.parameters(), eager.parameters(), exact.parameters(), strict=True):
        # As far from float32 as eager code in bfloat16 is.
        assert (one.grad - true.grad).norm() <= 1.5 * (other.grad - true.grad).norm()
    launched = names(lambda: step(ours, x, y))
    assert launched.count("_cross_entropy") == 1
    assert not any("softmax" in name.lower() for name in launched), launched
    notes = [note for record in step.program().history for note in record.notes]
    assert any("are one kernel with their gradient" in note for note in notes), notes
    assert any("whole rows" in note for note in notes) == (classes == 5003), notes
    assert not any("align1" in name for name in launched), launched  # products of rows that begin anywhere


def test_a_loss_that_is_scaled_and_one_that_is_squared() -> None:
    """The second one has a gradient that depends on the loss, and no kernel of ours."""

    def scaled(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        model.zero_grad()
        loss = F.cross_entropy(model(x), y, reduction="sum")
        (loss / 512).backward()
        return loss.detach()

    def squared(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        (loss**2).backward()
        return loss.detach()

    classes = _FEWEST_CLASSES
    x, y = torch.randn(512, 64, device="cuda"), torch.randint(classes, (512,), device="cuda")
    for fn, count in ((scaled, 1), (squared, 0)):
        step = ws.compile(fn, backend="inductor")
        ours, eager = Head(classes).cuda(), Head(classes).cuda()
        for _ in range(4):
            found = step(ours, x, y)
        torch.testing.assert_close(found, fn(eager, x, y), rtol=2.0**-18, atol=0.0)
        for one, other in zip(ours.parameters(), eager.parameters(), strict=True):
            assert (one.grad - other.grad).norm() <= 2.0**-16 * other.grad.norm()
        assert names(lambda step=step, ours=ours: step(ours, x, y)).count("_cross_entropy") == count


def test_no_rows_and_nothing_but_ignored_ones() -> None:
    share = torch.tensor(1.0, device="cuda")
    logits, target = drawn(0, 64, torch.bfloat16)
    losses, gradient = cross_entropy(logits, target, share, IGNORED)
    assert (losses.shape, gradient.shape) == ((0,), (0, 64))
    logits, target = drawn(9, 64, torch.bfloat16)
    losses, gradient = cross_entropy(logits, target.fill_(IGNORED), share, IGNORED)
    assert not losses.any()
    assert not gradient.any()
