"""Gradients of norms' weights on a GPU: partial sums of a kernel of Inductor, added up by one of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from wholestep.lower.kernels.column_sum import column_sums

pytestmark = pytest.mark.gpu

UNIT = 2.0**-24
ROWS, WIDTH, NORMS = 8192, 768, 3


@pytest.mark.parametrize(("count", "rows", "columns"), [(2, 512, 768), (1, 512, 2048), (3, 1000, 771), (1, 1, 1)])
def test_sums_are_those_of_float64(count: int, rows: int, columns: int) -> None:
    workspace = torch.randn(count * rows * columns, device="cuda")
    found = torch.stack(column_sums(workspace, count, rows, columns)).double()
    parts = workspace.view(count, rows, columns).double()
    assert bool(((found - parts.sum(1)).abs() <= rows * UNIT * parts.abs().sum(1)).all())


def train_step(model: nn.Module, x: Tensor) -> Tensor:
    model.zero_grad()
    loss = (model(x) ** 2).mean()
    loss.backward()
    return loss.detach()


def model_of(kind: type[nn.Module], dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    parts = [one for _ in range(NORMS) for one in (kind(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*parts).to("cuda", dtype)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def launches(step: Callable[[], Any]) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    return sum(one.name == "_sum_columns" for one in profile.events())


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize(("kind", "dtype"), [
    (nn.LayerNorm, torch.float32), (nn.RMSNorm, torch.float32), (nn.LayerNorm, torch.bfloat16)
])  # fmt: skip
def test_a_step_adds_them_up(kind: type[nn.Module], dtype: torch.dtype, graph: bool) -> None:
    step = ws.compile(train_step, backend=ws.Inductor(cuda_graph="auto" if graph else False))
    x = torch.randn(ROWS, WIDTH, device="cuda", dtype=dtype)
    model = model_of(kind, dtype)
    for _ in range(4):
        step(model, x)
    found, exact = gradients(model), model_of(kind, dtype).double()
    train_step(exact, x.double())
    plain = model_of(kind, dtype)
    train_step(plain, x)
    for name, wanted in gradients(exact).items():
        # As far from the truth as eager code, up to a few roundings of what is added up.
        unit = {torch.float32: UNIT, torch.bfloat16: 2.0**-9}[dtype]
        near = (gradients(plain)[name].double() - wanted).norm() + 8 * unit * wanted.norm()
        assert (found[name].double() - wanted).norm() <= 2 * near, name
    # The first norm needs no gradient of its input, so nothing is computed beside it.
    assert launches(lambda: step(model, x)) >= NORMS - 1


class Written(nn.Module):
    """RMS norm as models write it out, of (8, rows / 8, width): the gradient of its weight is a sum that keeps dims."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(8, -1, x.shape[-1])
        return (self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))).flatten(0, 1)


@pytest.mark.parametrize("graph", [True, False])
def test_sums_have_the_shape_that_was_captured(graph: bool) -> None:
    step = ws.compile(train_step, backend=ws.Inductor(cuda_graph="auto" if graph else False))
    x = torch.randn(ROWS, WIDTH, device="cuda")
    model, plain = model_of(Written, torch.float32), model_of(Written, torch.float32).double()
    for _ in range(4):
        step(model, x)
    train_step(plain, x.double())
    for name, wanted in gradients(plain).items():
        assert gradients(model)[name].shape == wanted.shape
        torch.testing.assert_close(gradients(model)[name].double(), wanted, rtol=2e-3, atol=1e-7, msg=name)
    assert launches(lambda: step(model, x)) >= NORMS - 1


@pytest.mark.parametrize("width", [96, 512, 640])
@pytest.mark.parametrize("rows", [512, 1024, 2048])
def test_few_rows_of_any_width_compile(rows: int, width: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.LayerNorm(width)).cuda()
    x = torch.randn(rows, width, device="cuda")
    train_step(model, x)
    wanted = gradients(model)
    step = ws.compile(train_step, backend="inductor")
    for _ in range(2):
        step(model, x)
    for name, found in gradients(model).items():
        torch.testing.assert_close(found, wanted[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [1024, ROWS])
def test_sums_that_are_part_of_another_tensor(rows: int) -> None:
    """Gradients that a step puts into one, as a bucket is."""

    def step(model: nn.Module, x: Tensor) -> Tensor:
        train_step(model, x)
        return torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])

    torch.manual_seed(0)
    x = torch.randn(rows, WIDTH, device="cuda")
    model, plain = model_of(nn.LayerNorm, torch.float32), model_of(nn.LayerNorm, torch.float32).double()
    compiled = ws.compile(step, backend="inductor")
    found = [compiled(model, x) for _ in range(2)][-1]
    wanted = step(plain, x.double())
    torch.testing.assert_close(found.double(), wanted, rtol=2e-3, atol=1e-7)
    torch.testing.assert_close(torch.cat([one.flatten() for one in gradients(model).values()]), found, rtol=0, atol=0)
