"""What a step leaves of ``requires_grad``: what it has set, and not what has come into a graph."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import wholestep as ws
from tests.harness.training import backward_and_step


def test_a_buffer_that_a_loss_is_written_to_takes_no_gradients_after_the_step() -> None:
    """As a leaf that does, it could not be written to in the next call."""
    model = nn.Linear(3, 3)
    model.register_buffer("mean", torch.zeros(3))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    @ws.compile(backend="eager", fullgraph=True)
    def step(x: Tensor) -> None:
        model.mean.mul_(0).add_(model(x).mean(0))
        backward_and_step(model.mean.sum(), opt)

    for call in range(3):
        step(torch.full((2, 3), float(call)))
        assert not model.mean.requires_grad
    assert step.cache_info().traces == 1


def test_what_the_step_freezes_and_thaws_is_so_after_it() -> None:
    model = nn.Linear(3, 3)
    model.bias.requires_grad_(False)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    @ws.compile(backend="eager", fullgraph=True)
    def step(x: Tensor) -> None:
        model.bias.requires_grad_(True)
        backward_and_step(model(x).sum(), opt)
        model.weight.requires_grad_(False)

    step(torch.ones(2, 3))
    assert (model.weight.requires_grad, model.bias.requires_grad) == (False, True)
