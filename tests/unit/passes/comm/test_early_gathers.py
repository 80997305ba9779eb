"""Gathers of updated parameters between reductions: where they stand, and that numbers stay the same bits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor, nn

import wholestep as ws
from tests.unit.place.test_sharded import placed
from tests.unit.runtime.verify.test_verify_sharded import PASSED, outcomes, verified
from tests.unit.sharded_models import accumulate, loss_of, train
from wholestep.config import Strategy
from wholestep.cost.cost_model import CostModel
from wholestep.ir import node_meta, op_info
from wholestep.ir.node_meta import BucketKind
from wholestep.ir.verifier import verify
from wholestep.passes.comm import early_gathers
from wholestep.passes.default_passes import passes_of
from wholestep.passes.pass_manager import run_passes

ZERO = ws.ZeRO()
COST = CostModel.default("cpu+gloo")


def starts(
    step: Any, *, strategy: Strategy = ZERO, optimizer: str = "adamw_foreach", hold_updates: bool = False
) -> str:
    """S for each reduction, G for each gather, in the order in which they start, in buckets of one parameter."""
    passes = passes_of(cost=COST, hold_updates=hold_updates, bucket_bytes=1)
    program = run_passes(placed(strategy, step=step, optimizer=optimizer), passes)
    verify(program)
    records = [node_meta.bucket(node) for node in program.graph.nodes if op_info.is_collective(node)]
    return "".join("G" if one.kind is BucketKind.GATHER else "S" for one in records if one is not None)


@pytest.fixture
def takes_us(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets how long gathers are thought to take where they are placed; reductions take no time."""

    def time(gather_us: float) -> None:
        def comm_us(node: fx.Node, *_: Any) -> float:
            return 1e-9 if node_meta.brings_gradients(node) else gather_us

        monkeypatch.setattr(early_gathers, "comm_us", comm_us)

    return time


def test_a_gather_follows_its_reduction_where_the_next_one_is_not_ready(takes_us: Any) -> None:
    takes_us(1e-9)
    assert starts(accumulate).startswith("SG")
    assert starts(accumulate).endswith("SG")
    assert starts(accumulate).count("G") == 6


def test_no_reduction_waits_for_a_gather(takes_us: Any) -> None:
    takes_us(1e9)
    assert starts(accumulate) == "S" * 6 + "G" * 6


def test_gathers_behind_a_norm_of_all_gradients_stay_at_the_end(takes_us: Any) -> None:
    takes_us(1e-9)
    assert starts(train) == "S" * 6 + "G" * 6


def noisy(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """Two draws that belong to parameters, and one to the whole step."""
    (loss_of(model, x, y) + torch.rand(())).backward()
    with torch.no_grad():
        for param in list(model.parameters())[-2:]:
            param.add_(torch.rand(()))
    opt.step()
    opt.zero_grad()


def test_draws_of_an_update_keep_their_order(takes_us: Any) -> None:
    """What is updated by a call on a list with what was drawn stays after it."""
    takes_us(1e-9)
    assert starts(noisy) == "S" * 6 + "G" * 6
    assert starts(noisy, optimizer="adamw_single") == "SSSGSGSGSGGG"
    found = verified(ws.ZeRO(bucket_bytes=1), step=noisy)
    assert outcomes(found)[:3] == PASSED[:3], str(found)


def test_held_updates_stay_behind_all_reductions(takes_us: Any) -> None:
    takes_us(1e-9)
    assert starts(accumulate, hold_updates=True) == "S" * 6 + "G" * 6


def test_gathers_of_the_computation_are_left(takes_us: Any) -> None:
    takes_us(1e9)
    before = starts(accumulate, strategy=ws.FSDP(reshard_after_forward=True))
    takes_us(1e-9)
    assert starts(accumulate, strategy=ws.FSDP(reshard_after_forward=True)) == before


def penalty_behind_a_backward(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    loss = loss_of(model, x, y)
    loss.backward(retain_graph=True)
    (loss + 0.01 * sum(param.square().sum() for param in model.parameters())).backward()
    opt.step()
    opt.zero_grad()


@pytest.mark.parametrize("again", [False, True])
def test_gathers_that_a_later_reduction_needs_stay_where_they_are(again: bool, takes_us: Any) -> None:
    """After a backward they are of no forward, and what stands before a reduction uses them."""
    takes_us(1e-9)
    found = starts(penalty_behind_a_backward, strategy=ws.FSDP(reshard_after_forward=again))  # which verifies it
    assert "G" in found


def test_buckets_of_gathers_end_where_those_of_reductions_do() -> None:
    """Otherwise a gather would wait for a later reduction than most of what it brings."""
    program = run_passes(placed(ws.ZeRO(), step=accumulate), passes_of(cost=COST, bucket_bytes=300))
    records = [node_meta.bucket(node) for node in program.graph.nodes if op_info.is_collective(node)]
    of = {kind: [set(one.members) for one in records if one is not None and one.kind is kind] for kind in BucketKind}
    assert len(of[BucketKind.SCATTER]) > 1
    for gather, scatter in itertools.product(of[BucketKind.GATHER], of[BucketKind.SCATTER]):
        assert gather <= scatter or not gather & scatter


@pytest.mark.parametrize("optimizer", ["sgd", "adamw_foreach", "adamw_fused"])
@pytest.mark.parametrize("ranks", [2, 3, (2, 2)])
def test_numbers_are_those_of_the_placed_program(ranks: Any, optimizer: str, takes_us: Any) -> None:
    takes_us(1e-9)
    strategy = ws.ZeRO(bucket_bytes=1)
    found = verified(strategy, width=7, optimizer=optimizer, step=accumulate, ranks=ranks)
    assert outcomes(found) == PASSED, str(found)
