"""Buckets of gathers, and the one order of collectives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.unit.place.test_sharded import SHARDS, placed
from wholestep.capture.capture import capture
from wholestep.cost.cost_model import CostModel
from wholestep.ir import node_meta, op_info
from wholestep.ir.node_meta import Bucket, BucketKind
from wholestep.ir.program import Program
from wholestep.ir.verifier import verify
from wholestep.passes.comm.bucketing import bucket_gradients
from wholestep.passes.comm.gather_buckets import bucket_gathers
from wholestep.passes.rewrites.cse import eliminate_common_subexpressions
from wholestep.place.shard_inputs import shard_inputs
from wholestep.place.strategies import place

COST = CostModel.default("cpu+gloo")


def bucketed(bucket_bytes: int, *, again: bool = True) -> Program:
    program = placed(ws.FSDP(reshard_after_forward=again), optimizer="sgd", width=16)
    program = eliminate_common_subexpressions(program)
    program = bucket_gradients(program, cost=COST, bucket_bytes=bucket_bytes)
    return bucket_gathers(program, cost=COST, bucket_bytes=bucket_bytes)


def trained_and_used(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """An update, and then a forward on what it has left: each draws a mask."""
    nn.functional.dropout(model(x), 0.5).square().mean().backward()
    opt.step()
    opt.zero_grad()
    return nn.functional.dropout(model(x), 0.5).detach()


def two_models(first: nn.Module, second: nn.Module, opts: list[torch.optim.Optimizer], x: Tensor) -> Tensor:
    return trained_and_used(first, opts[0], x) + trained_and_used(second, opts[1], x)


def test_gathers_of_one_bucket_stand_behind_the_same_random_numbers() -> None:
    """What the first model draws last needs its new weight. What the second draws comes later, and its weight then."""
    models = [nn.Linear(4, 4, bias=False) for _ in range(2)]
    args = (*models, [torch.optim.SGD(model.parameters(), lr=0.1) for model in models], torch.randn(2, 4))
    strategy = ws.FSDP(reshard_after_forward=False)
    program = capture(two_models, args, {}).program
    program = place(shard_inputs(program, strategy, (SHARDS,)), strategy, (SHARDS,))
    drawn = [node.name for node in program.graph.nodes if node.op == "call_function" and op_info.draws(node)]
    program = bucket_gathers(program, cost=COST, bucket_bytes=1 << 20)
    verify(program)
    program.graph.lint()
    assert [node.name for node in program.graph.nodes if node.op == "call_function" and op_info.draws(node)] == drawn
    assert len(drawn) == 4
    together = [one.members for one in buckets(program) if one.kind is BucketKind.GATHER and one.phase == "forward"]
    assert sorted(map(len, together)) == [1, 1, 2]


def buckets(program: Program) -> list[Bucket]:
    starts = [node for node in program.graph.nodes if op_info.is_collective(node)]
    return [record for node in starts if (record := node_meta.bucket(node)) is not None]


def test_every_parameter_is_gathered_once_a_phase_in_the_order_of_its_use() -> None:
    found = [one for one in buckets(bucketed(600)) if one.kind is BucketKind.GATHER]
    forward = [name for one in found if one.phase == "forward" for name in one.members]
    backward = [name for one in found if one.phase == "backward" for name in one.members]
    assert forward == ["0.bias", "0.weight", "2.bias", "2.weight", "4.bias", "4.weight"]
    assert backward == ["4.weight", "2.weight"]
    assert len(found) > 3


def test_kept_parameters_belong_to_the_forward() -> None:
    found = [one for one in buckets(bucketed(1200, again=False)) if one.kind is BucketKind.GATHER]
    assert {one.phase for one in found} == {"forward"}


@pytest.mark.parametrize("bucket_bytes", [1, 600, 1200, 1 << 20])
def test_a_gather_stands_before_the_reductions_since_the_last_one(bucket_bytes: int) -> None:
    """Else a later gather could start no earlier than the last gradient of the layer before is there."""
    program = bucketed(bucket_bytes)
    verify(program)
    kinds = [one.kind for one in buckets(program) if one.phase != "forward"]
    last_gather = max(place for place, kind in enumerate(kinds) if kind is BucketKind.GATHER)
    assert BucketKind.SCATTER not in kinds[:last_gather]
