"""The kernel of cross-entropy, run by Triton's interpreter. Builds of torch for CPUs come without Triton."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.unit import builders
from tests.unit.lower import triton_interpreter
from wholestep.lower.kernels import cross_entropy
from wholestep.passes.pass_manager import run_passes
from wholestep.passes.rewrites.dead_code import eliminate_dead_code
from wholestep.passes.rewrites.fuse_cross_entropy import CROSS_ENTROPY, fuse_cross_entropy

pytest.importorskip("triton")

IGNORED = -100
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-12}
"""Largest relative error of one rounding; the interpreter does not round to bfloat16, it cuts off."""


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks, so that rows are several of them."""
    interpreter = triton_interpreter.prepare(monkeypatch)
    monkeypatch.setattr(cross_entropy, "_kernel", interpreter.InterpretedFunction(cross_entropy._cross_entropy))
    monkeypatch.setattr(cross_entropy, "_BLOCK", (4, 4))


def wanted(logits: Tensor, target: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """In float64."""
    counts = target != IGNORED
    answers = torch.where(counts, target, 0)[:, None]
    logs = logits.double().log_softmax(1)
    losses = torch.where(counts, -logs.gather(1, answers)[:, 0], 0.0)
    gradient = (logs.exp() - torch.zeros_like(logs).scatter(1, answers, 1.0)) * share
    return losses, torch.where(counts[:, None], gradient, 0.0)


def check(logits: Tensor, target: Tensor, share: float = 0.3) -> None:
    losses, gradient = cross_entropy.cross_entropy(logits, target, torch.tensor(share), IGNORED)
    assert (losses.dtype, gradient.dtype, gradient.shape) == (torch.float32, logits.dtype, logits.shape)
    assert gradient.is_contiguous()
    exact = wanted(logits, target, share)
    # Exponents are as large as twice the largest logit; each rounding of them is one of the exponential, and sums of
    # as many numbers as there are classes are rounded as often.
    largest = float(logits.double().abs().nan_to_num(posinf=0.0).max())
    room = 8 * UNIT[torch.float32] * (2 * largest + logits.shape[1])
    torch.testing.assert_close(losses.double(), exact[0], rtol=0.0, atol=room)
    torch.testing.assert_close(gradient.double(), exact[1], rtol=2 * UNIT[logits.dtype], atol=share * room)


def drawn(rows: int, classes: int, dtype: torch.dtype = torch.float32, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rows * classes)
    target = torch.randint(classes, (rows,), generator=draw)
    target[1::3] = IGNORED
    return (scale * torch.randn(rows, classes, generator=draw)).to(dtype), target


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize(("rows", "classes"), [(9, 50), (1, 3), (3, 16), (7, 1)])
def test_losses_and_gradients_are_those_of_float64(rows: int, classes: int, dtype: torch.dtype) -> None:
    check(*drawn(rows, classes, dtype))


def test_no_rows() -> None:
    losses, gradient = cross_entropy.cross_entropy(
        torch.empty(0, 5), torch.empty(0, dtype=torch.int64), torch.tensor(1.0), IGNORED
    )
    assert (losses.shape, gradient.shape) == ((0,), (0, 5))


def test_large_logits_do_not_overflow() -> None:
    check(*drawn(5, 40, scale=3e4))


def test_rows_that_lie_apart() -> None:
    logits, target = drawn(6, 40)
    check(torch.cat([logits, torch.full_like(logits, torch.nan)], 1)[:, :40], target)


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize(("classes", "columns"), [(50, 64), (48, 64), (5, 32)])
def test_columns_that_are_no_classes(classes: int, columns: int, dtype: torch.dtype) -> None:
    """Whatever they hold, they count for nothing, and their gradient is zero."""
    logits, target = drawn(9, classes, dtype)
    wide = torch.cat([logits, torch.full((9, columns - classes), torch.nan, dtype=dtype)], 1)
    found = cross_entropy.cross_entropy(wide, target, torch.tensor(0.3), IGNORED, classes)
    wanted = cross_entropy.cross_entropy(logits, target, torch.tensor(0.3), IGNORED)
    assert found[1].shape == wide.shape
    assert not found[1][:, classes:].any()
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1][:, :classes], wanted[1])


def test_classes_that_are_masked_out() -> None:
    logits, target = drawn(6, 40)
    target[target == 7] = 8
    logits[:, 7] = float("-inf")
    logits[:, 16:32] = float("-inf")  # a whole block
    target[(target >= 16) & (target < 32)] = 0
    check(logits, target)
    logits[:, 0:16] = float("-inf")  # the first one as well
    target[target < 16] = 33
    check(logits, target)


def test_what_is_no_number_stays_none() -> None:
    logits, target = drawn(6, 40)
    target[:] = 3
    logits[0, 20] = torch.nan
    logits[2] = float("-inf")
    losses, gradient = cross_entropy.cross_entropy(logits, target, torch.tensor(1.0), IGNORED)
    assert losses.isnan().tolist() == [True, False, True, False, False, False]
    assert gradient.isnan().all(1).tolist() == losses.isnan().tolist()
    assert not gradient[losses.isfinite()].isnan().any()


def test_the_answer_of_nobody_is_not_read() -> None:
    """All rows are ignored: the gradient is zero, whatever the share, and the losses are."""
    logits, target = drawn(4, 20)
    target[:] = IGNORED
    losses, gradient = cross_entropy.cross_entropy(logits, target, torch.tensor(float("inf")), IGNORED)
    assert not losses.any()
    assert not gradient.any()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_step_computes_what_it_computes_without_the_kernel(reduction: str) -> None:
    logits, target = drawn(9, 50)

    def step(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        leaf = logits.detach().requires_grad_()
        loss = F.cross_entropy(leaf, target, reduction=reduction)
        (grad,) = torch.autograd.grad(loss * 3, leaf)
        return loss.detach(), grad

    before = run_passes(builders.without_gradients(builders.capture(step, [logits, target])), [eliminate_dead_code])
    lean = run_passes(before, [fuse_cross_entropy])
    own = run_passes(before, [partial(fuse_cross_entropy, fuses=lambda product: True)])
    assert builders.count(own, CROSS_ENTROPY) == 1
    wanted, found = (builders.execute(program, [logits, target])[0] for program in (lean, own))
    room = 8 * UNIT[torch.float32] * (2 * float(logits.abs().max()) + 50) * (1 if reduction == "mean" else 9)
    torch.testing.assert_close(found, wanted, rtol=4 * UNIT[torch.float32], atol=3 * room)
