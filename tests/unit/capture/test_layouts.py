"""Strides of fake tensors are those of the kernels, so that what is traced runs and has the bits of eager code."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import wholestep as ws
from wholestep.capture.layouts import Fakes

aten = torch.ops.aten
SHAPES = ((4, 3), (4, 3, 5), (2, 3, 4, 5), (1, 3, 4, 4), (2, 3, 2, 4, 5))


def layouts(shape: tuple[int, ...]) -> Iterator[Tensor]:
    """Tensors of a shape with their dimensions in memory in every order, and one that is part of a larger tensor."""
    for order in itertools.permutations(range(len(shape))):
        yield torch.randn([shape[axis] for axis in order]).permute([order.index(axis) for axis in range(len(shape))])
    yield torch.randn([2 * size for size in shape])[tuple(slice(size) for size in shape)]


def statistics(channels: int) -> tuple[Tensor, ...]:
    return torch.ones(channels), torch.zeros(channels), torch.zeros(channels), torch.ones(channels)


def norm(x: Tensor) -> tuple[Any, tuple[Any, ...]]:
    return aten.native_batch_norm.default, (x, *statistics(x.shape[1]), True, 0.1, 1e-5)


def norm_backward(x: Tensor) -> tuple[Any, tuple[Any, ...]]:
    weight, mean, running_mean, running_var = statistics(x.shape[1])
    grad = torch.randn(x.shape)
    saved = (running_mean, running_var, mean, torch.ones(x.shape[1]))
    return aten.native_batch_norm_backward.default, (grad, x, weight, *saved, True, 1e-5, [True] * 3)


def loss_backward(name: str, *options: float) -> Callable[[Tensor], tuple[Any, tuple[Any, ...]]]:
    return lambda x: (getattr(aten, name).default, (torch.ones(()), x, torch.randn(x.shape), 1, *options))


CALLS = {
    "norm": norm,
    "norm backward": norm_backward,
    "mse": loss_backward("mse_loss_backward"),
    "smooth l1": loss_backward("smooth_l1_loss_backward", 1.0),
    "huber": loss_backward("huber_loss_backward", 1.0),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_fake_has_the_strides_of_the_real_one(name: str, shape: tuple[int, ...]) -> None:
    for x in layouts(shape):
        operator, args = CALLS[name](x)
        mode = Fakes()
        fakes = [mode.from_tensor(arg) if isinstance(arg, Tensor) else arg for arg in args]
        with mode:
            made = operator(*fakes)
        real = operator(*args)
        fake, real = (made, real) if isinstance(real, Tensor) else (made[0], real[0])
        sized = [place for place, size in enumerate(shape) if size > 1]
        assert [fake.stride()[place] for place in sized] == [real.stride()[place] for place in sized], x.stride()


class Channels(nn.Module):
    """A batch norm over the last dimension, between layers that look at what lies together in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.linear(self.norm(x.transpose(1, 2)).transpose(1, 2))
        return normed.transpose(1, 2)


@pytest.mark.parametrize("loss", [functional.mse_loss, functional.smooth_l1_loss, functional.huber_loss])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_step_through_another_layout(loss: Callable[[Tensor, Tensor], Tensor], backend: str) -> None:
    model = Channels()

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        found = loss(model(x), y)
        return found, *torch.autograd.grad(found, list(model.parameters()))

    x, y = torch.randn(4, 5, 16), torch.randn(4, 8, 5)
    for got, want in zip(ws.compile(step, backend=backend)(x, y), step(x, y), strict=True):
        torch.testing.assert_close(got, want, rtol=0 if backend == "eager" else 1e-5, atol=1e-6 * (backend != "eager"))
