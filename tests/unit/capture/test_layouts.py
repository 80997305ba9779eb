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


def counted(x: Tensor) -> list[Tensor]:
    """`x` behind every write, read as a number each time."""
    view, seen = x[:], []
    torch._foreach_add_([x], 1.0)
    seen.append(torch.full((), x[0].item()))
    torch._foreach_mul_([view], 3.0)
    seen.append(torch.full((), x[0].item()))
    x.sub_(1)
    seen.append(torch.full((), x[0].item()))
    return seen


def held(x: Tensor) -> list[Tensor]:
    """Likewise, of a tensor that stays the same object."""
    one, seen = x.sum(), []
    for _ in range(2):
        torch._foreach_add_([one, x], 1.0)
        seen.append(torch.full((), one.item()))
    torch._fused_sgd_(
        [one], [torch.ones(())], [], weight_decay=0.0, momentum=0.0, lr=0.5, dampening=0.0, nesterov=False,
        maximize=False, is_first_step=True,
    )  # fmt: skip
    return [*seen, torch.full((), one.item())]


@pytest.mark.parametrize("fn", [counted, held])
@pytest.mark.parametrize("inference", [False, True])
def test_a_number_is_read_again_behind_a_write_to_a_list(fn: Callable[[Tensor], list[Tensor]], inference: bool) -> None:
    def step(x: Tensor) -> list[Tensor]:
        with torch.inference_mode(inference), torch.no_grad():
            return fn(x.clone())

    run = ws.compile(step, backend="eager")
    for number in range(2):
        x = torch.arange(3.0) + number
        assert [one.item() for one in run(x)] == [one.item() for one in step(x)]


def test_autograd_sees_that_a_list_was_written_to() -> None:
    """Eager code refuses such a backward, and so does the trace."""

    def step(x: Tensor) -> Tensor:
        w = torch.ones(3, requires_grad=True)
        held = w * 1
        loss = (held * held).sum() + x.sum()
        with torch.no_grad():
            torch._foreach_add_([held], 1.0)
        loss.backward()
        return loss.detach()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(torch.ones(3))
    with pytest.raises(Exception, match="modified by an inplace operation"):
        ws.compile(step, backend="eager")(torch.ones(3))
