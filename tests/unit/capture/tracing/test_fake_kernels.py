"""Strides of fake tensors are those of the kernels, so that what is traced runs and has the bits of eager code."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional

import wholestep as ws
from wholestep.capture.tracing.fake_kernels import LayoutFakeMode
from wholestep.capture.tracing.tensor_swap import swapped

aten = torch.ops.aten
SHAPES = ((4, 3), (4, 3, 5), (2, 3, 4, 5), (1, 3, 4, 4), (2, 3, 2, 4, 5))


def layouts(shape: tuple[int, ...]) -> Iterator[Tensor]:
    """Tensors of a shape with their dimensions in memory in every order, or in every fifth one of five dimensions, and
    one that is part of a larger tensor."""
    orders = list(itertools.permutations(range(len(shape))))
    if len(shape) == 5:
        orders = [*orders[::5], (0, 2, 3, 4, 1)]  # that of channels last
    for order in orders:
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


Call = Callable[[Tensor], tuple[Any, tuple[Any, ...]]]


def both(op: Any, args: Callable[[Tensor, Tensor], tuple[Any, ...]], name: str) -> dict[str, Call]:
    """An operator of two tensors, each once in another layout than the other one."""
    return {
        f"{name}, 1": lambda x: (op, args(x, torch.randn(x.shape))),
        f"{name}, 2": lambda x: (op, args(torch.randn(x.shape), x)),
    }


def padded(x: Tensor) -> Tensor:
    return functional.pad(x, (1, 1, 1, 1))


def group_norm_backward(x: Tensor) -> tuple[Any, ...]:
    """Autograd gives it gradients in the layout of its input, or copies them."""
    image, of_groups = x.contiguous(memory_format=torch.channels_last), torch.ones(x.shape[:2])
    sizes = len(x), x.shape[1], x[0, 0].numel(), x.shape[1]
    return image, image, of_groups, of_groups, torch.ones(x.shape[1]), *sizes, [True] * 3


PAIRS: list[tuple[Any, Callable[[Tensor, Tensor], tuple[Any, ...]]]] = [
    (aten.softplus_backward.default, lambda a, b: (a, b, 1.0, 20.0)),
    (aten.elu_backward.default, lambda a, b: (a, 1.0, 1.0, 1.0, False, b)),
    (aten.hardtanh_backward.default, lambda a, b: (a, b, -1.0, 1.0)),
    (aten.hardswish_backward.default, lambda a, b: (a, b)),
    (aten.hardsigmoid_backward.default, lambda a, b: (a, b)),
    (aten.logit_backward.default, lambda a, b: (a, b)),
    (aten.native_dropout_backward.default, lambda a, b: (a, b > 0, 2.0)),
    (aten.rrelu_with_noise_backward.default, lambda a, b: (a, b, b, 0.1, 0.3, True, False)),
    (aten.xlogy.Tensor, lambda a, b: (a, b)),
    (aten.special_xlog1py.default, lambda a, b: (a, b)),
    (aten.copysign.Tensor, lambda a, b: (a, b)),
    (aten.floor_divide.default, lambda a, b: (a, b)),
    (aten.binary_cross_entropy.default, lambda a, b: (a.sigmoid(), b.sigmoid(), None, 0)),
    (aten.binary_cross_entropy_backward.default, lambda a, b: (a, b.sigmoid(), b.sigmoid(), None, 0)),
    (aten._log_softmax_backward_data.default, lambda a, b: (a, b, 1, torch.float32)),
    (aten.normal.Tensor_Tensor, lambda a, b: (a, b.abs())),
    (aten.pow.Scalar, lambda a, b: (2.0, a + b)),
    (aten.log_sigmoid_forward.default, lambda a, b: (a + b,)),
    (aten.roll.default, lambda a, b: (a + b, [1], [1])),
    (aten.glu_backward.default, lambda a, b: (a, torch.cat([b, b], 1), 1)),
    (aten._weight_norm_interface.default, lambda a, b: (a, torch.ones(len(a), *[1] * (a.dim() - 1)), 0)),
]
IMAGES: list[tuple[Any, Callable[[Tensor, Tensor], tuple[Any, ...]]]] = [
    (aten.replication_pad2d_backward.default, lambda a, b: (padded(a), b, [1] * 4)),
    (aten.reflection_pad2d_backward.default, lambda a, b: (padded(a), b, [1] * 4)),
    (aten.channel_shuffle.default, lambda a, b: (a + b, 1)),
    (aten.upsample_bilinear2d.default, lambda a, b: (a + b, [7, 9], False)),
    (
        aten.max_unpool2d.default,
        lambda a, b: (a + b, torch.zeros(a.shape, dtype=torch.long), [2 * size for size in a.shape[2:]]),
    ),
    (
        aten.native_layer_norm_backward.default,
        lambda a, b: (
            a, b, [a.shape[-1]], *[torch.ones(*a.shape[:-1], 1)] * 2, *[torch.ones(a.shape[-1])] * 2, [True] * 3
        ),
    ),
    (aten.native_group_norm_backward.default, lambda a, b: group_norm_backward(a + b)),
]  # fmt: skip

CALLS: dict[str, Call] = {
    "norm": norm,
    "norm backward": norm_backward,
    "mse": loss_backward("mse_loss_backward"),
    "smooth l1": loss_backward("smooth_l1_loss_backward", 1.0),
    "huber": loss_backward("huber_loss_backward", 1.0),
}
for operator, arguments in (*PAIRS, *IMAGES):
    CALLS |= both(operator, arguments, str(operator))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_fake_has_the_strides_of_the_real_one(name: str, shape: tuple[int, ...]) -> None:
    if len(shape) != 4 and any(str(operator) in name for operator, _ in IMAGES):
        pytest.skip("takes images alone")
    for x in layouts(shape):
        operator, args = CALLS[name](x)
        mode = LayoutFakeMode()
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
def test_a_step_through_another_layout_equals_eager_code(
    loss: Callable[[Tensor, Tensor], Tensor], backend: str
) -> None:
    model = Channels()

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        found = loss(model(x), y)
        return found, *torch.autograd.grad(found, list(model.parameters()))

    x, y = torch.randn(4, 5, 16), torch.randn(4, 8, 5)
    for got, want in zip(ws.compile(step, backend=backend)(x, y), step(x, y), strict=True):
        torch.testing.assert_close(got, want, rtol=0 if backend == "eager" else 1e-5, atol=1e-6 * (backend != "eager"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("groups", ["rows", "columns", "sums", "each"])
def test_products_of_groups_have_the_strides_of_the_real_ones(groups: str, dtype: torch.dtype) -> None:
    ends = torch.tensor([8, 16], dtype=torch.int32)
    of = {
        "rows": ((16, 8), (2, 8, 24), ends),
        "columns": ((2, 8, 16), (16, 16), ends),
        "sums": ((24, 16), (16, 8), ends),
        "each": ((2, 8, 16), (2, 16, 24), None),
    }
    left, right, offs = of[groups]
    for turned in (False, True):
        a, b = torch.randn(left).to(dtype), torch.randn(right).to(dtype)
        if turned:
            b = b.mT.contiguous().mT
            b = b[..., :-2] if groups in ("rows", "each") else b  # a result whose rows do not fill 16 bytes
        real = aten._grouped_mm.default(a, b, offs)
        mode = LayoutFakeMode()
        with mode:
            made = aten._grouped_mm.default(*(one if one is None else mode.from_tensor(one) for one in (a, b, offs)))
        assert (made.shape, made.stride(), made.dtype) == (real.shape, real.stride(), real.dtype)


class Gated(nn.Module):
    """What keeps a gate's gradient in another layout than its argument: state-space models and their kin."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(6, 5, bias=False), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        decay = functional.softplus(self.gate(x)).transpose(1, 2)
        moved: Tensor = decay.cumsum(-1) * self.value(x).transpose(1, 2)
        return moved


class Experts(nn.Module):
    """A mixture of experts in float32, sorted by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.route, self.weight = nn.Linear(8, 3), nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        score, expert = self.route(x.flatten(0, 1)).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        ends = functional.one_hot(expert, 3).sum(0)
        rows = functional.grouped_mm(x.flatten(0, 1)[order], self.weight, offs=ends.cumsum(0).to(torch.int32))
        back: Tensor = rows[order.argsort()] * score[:, None]
        return back


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("kind", [Gated, Experts])
def test_steps_with_unusual_layouts_equal_eager_code(kind: type[nn.Module], backend: str) -> None:
    torch.manual_seed(1)
    model = kind()

    def step(x: Tensor) -> tuple[Tensor, ...]:
        loss = model(x).square().mean()
        return loss, *torch.autograd.grad(loss, list(model.parameters()))

    run = ws.compile(step, backend=backend)
    for _ in range(2):
        x = torch.randn(4, 7, 6 if kind is Gated else 8)
        for got, want in zip(run(x), step(x), strict=True):
            torch.testing.assert_close(
                got, want, rtol=0 if backend == "eager" else 1e-5, atol=1e-6 * (backend != "eager")
            )


def counted(x: Tensor) -> list[Tensor]:
    """`x` after every write, read as a number each time."""
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
def test_a_number_is_read_again_after_a_write_to_a_list(fn: Callable[[Tensor], list[Tensor]], inference: bool) -> None:
    def step(x: Tensor) -> list[Tensor]:
        with torch.inference_mode(inference), torch.no_grad():
            return fn(x.clone())

    run = ws.compile(step, backend="eager")
    for number in range(2):
        x = torch.arange(3.0) + number
        assert [one.item() for one in run(x)] == [one.item() for one in step(x)]


@pytest.mark.parametrize("may_go_live", [True])
def test_autograd_sees_that_a_list_was_written_to(may_go_live: bool) -> None:
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
    for fullgraph in (True, False):  # a live step raises what eager code does
        with pytest.raises((RuntimeError, ws.CaptureError), match="modified by an inplace operation"):
            ws.compile(step, backend="eager", fullgraph=fullgraph)(torch.ones(3))


def test_memory_of_the_host_has_one_device() -> None:
    """Libraries name it by the number of a rank: "cpu:1"."""

    def step(x: Tensor) -> tuple[Tensor, bool]:
        moved, made = x.to("cpu:1"), torch.ones(3, device="cpu:0")
        return moved * 2 + made + x, moved.device == made.device == torch.device("cpu")

    run = ws.compile(step, backend="eager", fullgraph=True)
    x = torch.arange(3.0)
    assert torch.equal(run(x)[0], step(x)[0])
    assert run(x)[1] is step(x)[1] is True


def test_nothing_is_remembered_under_other_switches_of_torch() -> None:
    """Whether a convolution is channels-last is up to cuDNN, and torch remembers what it said when that was on."""

    def remembered() -> int:
        LayoutFakeMode()
        return FakeTensorMode.cache_info().size

    with LayoutFakeMode() as mode:
        x = mode.from_tensor(torch.ones(2, 3))
        x + x
    assert remembered()
    with torch.backends.cudnn.flags(enabled=not torch.backends.cudnn.enabled):
        assert not remembered()


def test_a_copy_of_a_fake_tensor_is_of_the_same_mode() -> None:
    """A mode that is copied frees the memory of others: weak references to storages count themselves."""
    mode = LayoutFakeMode()
    fake = mode.from_tensor(torch.ones(2))
    assert copy.deepcopy(mode) is mode
    assert copy.deepcopy(vars(fake))["fake_mode"] is mode


@pytest.mark.parametrize("may_go_live", [True])
def test_a_step_may_copy_the_state_of_its_optimizer(may_go_live: bool) -> None:
    models = [nn.Linear(2, 1) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())

    def make(model: nn.Linear) -> Callable[[Tensor], None]:
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x: Tensor) -> None:
            model(x).sum().backward()
            opt.step()
            opt.load_state_dict(copy.deepcopy(opt.state_dict()))
            opt.zero_grad()

        return step

    wanted, step = make(models[0]), ws.compile(make(models[1]), backend="eager")
    for _ in range(3):
        x = torch.randn(3, 2)
        wanted(x)
        step(x)
    assert torch.equal(models[0].weight, models[1].weight)


def test_a_tensor_that_c_holds_weakly_is_as_it_was_behind_a_failed_trace() -> None:
    """`retain_grad` takes a weak reference to its tensor, which cannot be exchanged for a fake one then."""
    layer = nn.Linear(2, 1)

    def step(x: Tensor) -> None:
        x.retain_grad()
        layer(x).sum().backward()

    x = torch.ones(3, 2, requires_grad=True) * 2
    with pytest.raises(ws.CaptureError, match=r"a \[3, 2\] that was computed outside of it keep its gradient"):
        ws.compile(step, backend="eager", fullgraph=True)(x)
    held = torch.ones(3, 2, requires_grad=True) * 2
    held.retain_grad()
    with pytest.raises(ws.CaptureError, match="weakref"):
        ws.compile(lambda x: layer(x).detach(), backend="eager", fullgraph=True)(held)
    assert [type(one) for one in (x, held, *layer.parameters())] == [Tensor, Tensor, nn.Parameter, nn.Parameter]


def test_every_tensor_is_put_back_though_one_cannot_be() -> None:
    reals = [torch.ones(2), torch.ones(3, requires_grad=True) * 2, torch.ones(4)]
    mode = LayoutFakeMode()

    def trace() -> None:
        with swapped(reals, [mode.from_tensor(one) for one in reals]):
            reals[1].retain_grad()

    with pytest.raises(RuntimeError, match="weakref"):
        trace()
    assert [type(one) for one in (reals[0], reals[2])] == [Tensor, Tensor]
