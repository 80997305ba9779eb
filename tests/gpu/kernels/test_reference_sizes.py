"""Gradients at the sizes of the reference trainings, where kernels are chosen that small tests do not reach.

The first step of SGD without momentum moves a parameter by its gradient, which is compared with float64's: as near as
eager code's, parameter by parameter.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import wholestep as ws
from wholestep.cli.suite.workloads import draw_tokens
from wholestep.cli.workloads.reference_lm import REFERENCE, build
from wholestep.config import Strategy

pytestmark = pytest.mark.gpu

LAYERS = 2
UNITS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9}
STRATEGIES: dict[str, Strategy] = {"ddp": ws.DDP(), "zero2": ws.ZeRO(stage=2), "fsdp": ws.FSDP()}
"""Of a step on two ranks."""


def gradients(model: nn.Module, batches: list[tuple[Tensor, Tensor]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Of the mean loss of all ranks' batches, by eager code under autocast."""
    for batch in batches:
        with torch.autocast("cuda", dtype, enabled=dtype is torch.bfloat16):
            loss = model(*batch) / len(batches)
        loss.backward()
    return {name: param.grad.double() for name, param in model.named_parameters() if param.grad is not None}


def faults(workload: str, strategy: str | None, dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    """Parameters that a compiled step moves otherwise: how far it is from float64, and how far eager code is."""
    world = ws.init()
    size = dataclasses.replace(REFERENCE[workload], num_layers=LAYERS)
    torch.manual_seed(0)
    model = build(size, world.device)
    batches = [tuple(one.to(world.device) for one in draw_tokens(size, rank)) for rank in range(world.size)]
    exact = gradients(copy.deepcopy(model).double(), batches, torch.float64)  # type: ignore[arg-type]
    eager = gradients(copy.deepcopy(model), batches, dtype)  # type: ignore[arg-type]
    before = {name: param.detach().double() for name, param in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step(x: Tensor, y: Tensor) -> None:
        with torch.autocast("cuda", dtype, enabled=dtype is torch.bfloat16):
            loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    compiled = ws.compile(step, strategy=None if strategy is None else STRATEGIES[strategy], fullgraph=True)
    compiled(*batches[world.rank])
    moved = {name: param.detach() for name, param in model.named_parameters()}
    moved = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in moved.items()}
    found = {}
    for name, wanted in exact.items():
        off, allowed = ((one - wanted).norm() for one in (before[name] - moved[name].double(), eager[name]))
        # Roundings of what is added up, and of the parameter that the gradient is taken from.
        room = 2 * allowed + 8 * UNITS[dtype] * wanted.norm() + 2 * UNITS[torch.float32] * before[name].norm()
        if not off <= room:
            found[name] = (float(off), float(allowed))
    return found


@pytest.mark.parametrize("dtype", UNITS, ids=str)
@pytest.mark.parametrize("workload", ["W1", "W2"])
def test_gradients_are_as_near_to_float64_as_eager_ones(workload: str, dtype: torch.dtype) -> None:
    assert not faults(workload, None, dtype)


@pytest.mark.parametrize("dtype", UNITS, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("workload", ["W1", "W2"])
def test_so_are_those_of_two_ranks(workload: str, strategy: str, dtype: torch.dtype, nccl2: Any) -> None:
    for found in nccl2.run(faults, workload, strategy, dtype):
        assert not found
