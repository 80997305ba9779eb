"""Memory of sharded strategies by category, beside the formulas: of P bytes of parameters on W ranks, with AdamW."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import wholestep as ws
from tests.unit.place.test_sharded import SHARDS, placed
from wholestep.api.report.explain import explain
from wholestep.api.report.prediction import predict
from wholestep.config import Strategy
from wholestep.cost.cost_model import CostModel
from wholestep.ir import node_meta
from wholestep.ir.node_meta import BucketKind
from wholestep.ir.program import InputKind, Program
from wholestep.passes.default_passes import passes_of
from wholestep.passes.pass_manager import run_passes

COST = CostModel.default("h200+nvlink")
WITHIN = 0.02
WIDTH = 64


def scheduled(strategy: Strategy, optimizer: str = "adamw_foreach") -> Program:
    return run_passes(
        placed(strategy, "gpt", optimizer, width=WIDTH), passes_of(cost=COST, bucket_bytes=32 * WIDTH * WIDTH)
    )


def whole_bytes(program: Program) -> int:
    shapes = [
        one.shape if one.shard is None else one.shard.whole_shape
        for one in program.inputs
        if one.kind is InputKind.PARAM
    ]
    return sum(4 * _product(shape) for shape in shapes)


def _product(shape: tuple[int, ...]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found


@pytest.mark.parametrize(
    ("strategy", "parameters", "optimizer", "gathered"),
    [
        (ws.DDP(), 1.0, 2.0, 0.0),
        (ws.ZeRO(), 1.0, 2.0 / SHARDS.size, 0.0),
        (ws.FSDP(reshard_after_forward=False), 1.0 / SHARDS.size, 2.0 / SHARDS.size, 1.0),
    ],
    ids=["ddp", "zero", "keep"],
)
def test_bytes_are_those_of_the_formula(
    strategy: Strategy, parameters: float, optimizer: float, gathered: float
) -> None:
    program = scheduled(strategy)
    found, whole = predict(program, COST).peak.by_category, whole_bytes(program)
    wanted = {"parameters": parameters, "optimizer state": optimizer, "gathered parameters": gathered}
    assert {name: found[name] / whole for name in wanted} == pytest.approx(wanted, abs=WITHIN)


def test_gathered_again_a_few_buckets_live_at_once() -> None:
    """One that is used and those in flight."""
    program = scheduled(ws.FSDP(reshard_after_forward=True))
    found = predict(program, COST).peak.by_category
    records = [record for node in program.graph.nodes if (record := node_meta.bucket(node)) is not None]
    largest = max(record.num_bytes for record in records if record.kind is BucketKind.GATHER)
    assert 0 < found["gathered parameters"] <= 2 * largest < 0.6 * whole_bytes(program)


def test_the_explanation_tells_gathers_and_what_is_computed_whole() -> None:
    program = scheduled(ws.FSDP(reshard_after_forward=True))
    told = explain(program, step="train", strategy="FSDP", backend="eager", cost=COST)
    gathers = [one for one in told.collectives if one.kind == "gather"]
    assert {one.phase for one in gathers} == {"forward", "backward"}
    name = gathers[0].members[0]
    number = told.bucket_of(name)
    assert number is not None
    assert told.collectives[number].kind == "scatter"
    text = " ".join(str(told).split())
    assert "gather, backward" in text
    assert told.fallbacks == ()
    assert "Operators that run on whole tensors" not in text


def test_the_explanation_names_operators_without_a_rule() -> None:
    program = placed(ws.FSDP(), "mlp", step=with_a_sum)
    told = explain(program, step="train", strategy="FSDP", backend="eager", cost=COST)
    assert [one.operator for one in told.fallbacks] == ["aten.cumsum.default"]
    text = " ".join(str(told).split())
    assert "Operators that run on whole tensors" in text
    assert "aten.cumsum.default" in text


def with_a_sum(model: Any, opt: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A step that adds up the rows of a parameter, one upon another."""
    torch.nn.functional.cross_entropy(model(x), y).backward()
    opt.step()
    return next(model.parameters()).detach().cumsum(0)
