"""The end of nearly every training step, once for all tests."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer


def backward_and_step(loss: Tensor, opt: Optimizer) -> Tensor:
    """Backward, one update, gradients dropped; returns the loss."""
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss
