"""Measured times of a compiled step on two ranks: a rank that is late is waited for, and nothing else changes."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.harness.training import backward_and_step
from wholestep.api.report.records import Explanation

pytestmark = pytest.mark.ranks

LATE_S, CALLS = 0.5, 3


def train(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
    return backward_and_step(model(x).square().mean(), opt).detach()


def trained(*, measured: bool) -> tuple[list[Tensor], ws.CompiledStep]:
    """Parameters after some calls, of which rank 1 is late for each that is timed."""
    world = ws.init()
    torch.manual_seed(world.rank)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))).to(world.device)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ws.compile(train, strategy=ws.DDP(bucket_bytes=1000), fullgraph=True)
    x = torch.randn(4, 16, device=world.device)
    step(model, opt, x)
    if measured:
        step.measure(CALLS)
    for _ in range(CALLS + 2):
        if measured and world.rank == 1:
            time.sleep(LATE_S)
        step(model, opt, x)
    return [param.detach().cpu() for param in model.parameters()], step


def waits() -> tuple[bool, Explanation]:
    plain, _ = trained(measured=False)
    timed, step = trained(measured=True)
    return all(map(torch.equal, plain, timed)), step.explain()


def test_a_late_rank_is_waited_for(ranks2: Any) -> None:
    (same, early), (also, late) = ranks2.run(waits)
    assert same
    assert also
    assert early.measured.num_calls == late.measured.num_calls == CALLS
    assert len(early.collectives) == 3
    late_us = 1e6 * LATE_S
    assert early.collectives[0].measured_exposed_us > 0.8 * late_us  # the others are on time then
    assert all(one.measured_exposed_us < 0.5 * late_us for one in early.collectives[1:])
    assert late.measured.exposed_us < 0.5 * late_us
    for said in (early, late):
        assert said.measured.p10_us <= said.measured.step_us <= said.measured.p90_us
        assert said.measured.exposed_us <= said.measured.step_us
        assert "Measured on this rank" in str(said)
