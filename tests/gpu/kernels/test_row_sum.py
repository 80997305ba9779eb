"""Gradients of biases on a GPU: sums over the rows of matrices, two launches for all of a segment."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from wholestep.lower.kernels.row_sum import sum_rows

pytestmark = pytest.mark.gpu

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize(
    ("rows", "columns"), [(8192, (3072, 768)), (1024, (2304, 768)), (300, (7,)), (257, (64, 1, 100))]
)
def test_sums_are_those_of_float64(rows: int, columns: tuple[int, ...], dtype: torch.dtype) -> None:
    matrices = [torch.randn(rows, size, device="cuda").to(dtype) for size in columns]
    found = sum_rows(matrices, rows, columns, dtype, torch.float32)
    for matrix, one in zip(matrices, found, strict=True):
        exact = matrix.double().sum(0)
        bound = rows * UNIT[torch.float32] * matrix.double().abs().sum(0) + UNIT[dtype] * exact.abs()
        assert bool(((one.double() - exact).abs() <= bound).all())
        assert torch.equal(one, one.to(dtype).float())  # rounded to the type of the matrix
    assert all(map(torch.equal, found, sum_rows(matrices, rows, columns, dtype, torch.float32)))


def train_step(model: nn.Module, x: Tensor) -> Tensor:
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        out = model(x)
    loss = out.float().square().mean()
    loss.backward()
    return loss.detach()


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 96)).cuda()


def names_of(call: Any) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [one.name for one in profile.events()]


@pytest.mark.parametrize("graph", [True, False])
def test_a_step_adds_them_up(graph: bool) -> None:
    step = ws.compile(train_step, backend=ws.Inductor(cuda_graph="auto" if graph else False))
    x = torch.randn(2048, 96, device="cuda")
    model, plain, exact = model_of(), model_of(), model_of().double()
    for _ in range(4):
        step(model, x)
    train_step(plain, x)
    exact(x.double()).square().mean().backward()
    biases = [name for name, _ in model.named_parameters() if name.endswith("bias")]
    for name in biases:
        wanted = exact.get_parameter(name).grad
        assert wanted is not None
        found, eager = (one.get_parameter(name).grad.double() for one in (model, plain))  # type: ignore[union-attr]
        assert (found - wanted).norm() <= 2 * (eager - wanted).norm() + 2.0**-8 * wanted.norm(), name
    launched = names_of(lambda: step(model, x))
    assert launched.count("_add_rows") == launched.count("_add_parts") >= 1
    assert launched.count("_add_rows") <= len(biases)
