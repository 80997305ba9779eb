"""Programs with a cross-entropy before and after its rewrites, and its kernel in the words of ATen."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.unit import builders
from tests.unit.builders import aten
from wholestep.ir.program import Program
from wholestep.passes.pass_manager import run_passes
from wholestep.passes.rewrites.dead_code import eliminate_dead_code
from wholestep.passes.rewrites.fuse_cross_entropy import CROSS_ENTROPY, fuse_cross_entropy


def lean(fn: Callable[..., Any], given: list[Tensor]) -> tuple[Program, Program]:
    """The program of `fn`, and what the pass makes of it."""
    before = run_passes(builders.without_gradients(builders.capture(fn, given)), [eliminate_dead_code])
    return before, run_passes(before, [fuse_cross_entropy])


def in_words_of_aten(
    logits: Tensor, target: Tensor, share: Tensor, ignored: int, classes: int | None = None
) -> tuple[Tensor, Tensor]:
    if classes is not None:
        losses, gradient = in_words_of_aten(logits[:, :classes], target, share, ignored)
        return losses, F.pad(gradient, [0, logits.shape[1] - classes])
    leaf = logits.float().requires_grad_()
    with torch.enable_grad():
        losses = F.cross_entropy(leaf, target, ignore_index=ignored, reduction="none")
        (gradient,) = torch.autograd.grad((losses * share.detach()).sum(), leaf)
    return losses.detach(), gradient.to(logits.dtype)


FUSE = partial(fuse_cross_entropy, fuses=lambda product: True)


def fused(before: Program) -> Program:
    after = run_passes(before, [FUSE])
    assert builders.count(after, CROSS_ENTROPY) == 1
    gone = (aten._log_softmax.default, aten.nll_loss_forward.default, aten.nll_loss_backward.default)
    assert builders.count(after, *gone, aten._log_softmax_backward_data.default) == 0
    assert after.history[-1].notes[1] == "1 cross-entropies are one kernel with their gradient"
    return after
