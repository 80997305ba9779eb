"""What placement makes of sharded inputs: how many collectives, of what, and which operators it has no rule for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.unit.sharded_models import MODELS, OPTIMIZERS, accumulate, batch, made, train
from wholestep.capture.capture import capture
from wholestep.config import Strategy
from wholestep.ir import node_meta
from wholestep.ir.node_meta import BucketKind
from wholestep.ir.program import InputKind, MeshAxis, Placement, Program, ShardSpec
from wholestep.place.shard_inputs import shard_inputs
from wholestep.place.strategies import place

SHARDS, REPLICAS = MeshAxis(name="dp_shard", size=2, group="0"), MeshAxis(name="dp_replicate", size=2, group="1")


@cache
def captured(step: Callable[..., Any], model: str, optimizer: str, width: int) -> Program:
    return capture(step, (*made(model, width, optimizer), *batch(model)), {}).program


def placed(
    strategy: Strategy,
    model: str = "mlp",
    optimizer: str = "adamw_foreach",
    *,
    width: int = 8,
    step: Callable[..., Any] = train,
    axes: tuple[MeshAxis, ...] = (SHARDS,),
) -> Program:
    program = captured(step, model, optimizer, width)
    return place(shard_inputs(program, strategy, axes), strategy, axes)


def collectives(program: Program) -> Counter[str]:
    """How often each kind of bucket travels, gathers by phase; and norms, which are in none."""
    found: Counter[str] = Counter()
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target.__module__.startswith("torch._ops._c10d_functional"):
            bucket = node_meta.bucket(node)
            if "wait_tensor" in str(node.target) or "broadcast" in str(node.target):
                continue
            kind = "other" if bucket is None else bucket.kind.value
            found[f"{kind} {bucket.phase}".strip() if bucket and bucket.kind is BucketKind.GATHER else kind] += 1
    return found


def num_params(program: Program) -> int:
    return sum(record.kind is InputKind.PARAM for record in program.inputs)


def test_kept_parameters_are_gathered_once_a_step() -> None:
    program = placed(ws.FSDP(reshard_after_forward=False))
    assert collectives(program) == {"gather": 6, "scatter": 6, "other": 1}


def test_parameters_that_the_backward_reads_are_gathered_again() -> None:
    # The backward of a linear layer reads its weight, but of the first, whose input needs no gradient; and no bias.
    program = placed(ws.FSDP(reshard_after_forward=True))
    assert collectives(program) == {"gather forward": 6, "gather backward": 2, "scatter": 6, "other": 1}


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_gathers_updated_parameters(stage: Any) -> None:
    program = placed(ws.ZeRO(stage=stage))
    assert collectives(program) == {"gather end": 6, "scatter": 6, "other": 1}


def test_over_replicas_parts_of_gradients_are_summed() -> None:
    program = placed(ws.FSDP(), axes=(SHARDS, REPLICAS))
    assert collectives(program) == {"gather": 6, "scatter": 6, "reduce": 6, "other": 1}
    groups = {node_meta.bucket(node).kind: node.args[-1] for node in program.graph.nodes if node_meta.bucket(node)}
    assert groups == {BucketKind.GATHER: "0", BucketKind.SCATTER: "0", BucketKind.REDUCE: "1"}


def test_micro_batches_in_one_call_are_reduced_once() -> None:
    program = placed(ws.FSDP(reshard_after_forward=False), step=accumulate)
    assert collectives(program) == {"gather": 6, "scatter": 6}


def stays(model: nn.Module, opt: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    """A step that adds to the gradients that are there, and leaves them."""
    nn.functional.cross_entropy(model(x), y).backward()
    opt.step()


def with_gradients() -> Program:
    model, opt = made("mlp", 7, "adamw_foreach")
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    return capture(stays, (model, opt, *batch("mlp")), {}).program


@pytest.mark.parametrize("strategy", [ws.FSDP(reduce="sum"), ws.ZeRO(stage=2, reduce="sum")], ids=["f", "z"])
def test_gradients_from_before_a_call_are_added_behind_the_reduction(strategy: Strategy) -> None:
    """They are sums over the ranks already."""
    program = place(shard_inputs(with_gradients(), strategy, (SHARDS,)), strategy, (SHARDS,))
    assert collectives(program) == {"gather" if isinstance(strategy, ws.FSDP) else "gather end": 6, "scatter": 6}
    starts = [node for node in program.graph.nodes if "reduce_scatter_tensor" in str(node.target)]
    added = [user for start in starts for wait in start.users for user in wait.users if "add" in str(user.target)]
    assert len(added) == len(starts)
    gradients = [
        node for node, one in zip(program.placeholders, program.inputs, strict=True) if one.kind is InputKind.GRAD
    ]
    assert {arg for node in added for arg in node.all_input_nodes} >= {*gradients}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", [ws.FSDP(), ws.FSDP(reshard_after_forward=True), ws.ZeRO()], ids=["f", "r", "z"])
@pytest.mark.parametrize("width", [8, 7])
def test_these_optimizers_run_on_parts(strategy: Strategy, optimizer: str, model: str, width: int) -> None:
    program = placed(strategy, model, optimizer, width=width)
    assert program.fallbacks == ()
    single = sum(record.kind is InputKind.PARAM and not record.shape for record in program.inputs)
    found = collectives(program)
    assert (found["scatter"], found["reduce"], found["other"]) == (num_params(program) - single, single, 1)


def test_inputs_are_padded_parts_and_the_rank_is_one_more() -> None:
    program = placed(ws.FSDP(), width=7)
    spec = ShardSpec(axis="dp_shard", num_ranks=2, dim=0, whole_shape=(7, 6))
    weight = next(record for record in program.inputs if record.name == "0.weight")
    assert (weight.shape, weight.placement, weight.shard) == ((4, 6), Placement.SHARD, spec)
    state = next(record for record in program.inputs if record.name.endswith("exp_avg.0.weight"))
    assert (state.shape, state.shard) == ((4, 6), spec)
    assert [record.kind for record in program.inputs][-1] is InputKind.RANK


@pytest.mark.parametrize(
    ("strategy", "kinds"),
    [
        (ws.DDP(), set()),
        (ws.ZeRO(), {InputKind.OPTIMIZER}),
        (ws.ZeRO(stage=2), {InputKind.OPTIMIZER, InputKind.GRAD}),
        (ws.FSDP(), {InputKind.OPTIMIZER, InputKind.GRAD, InputKind.PARAM}),
    ],
)
def test_which_inputs_a_strategy_cuts(strategy: Strategy, kinds: set[InputKind]) -> None:
    cut = shard_inputs(with_gradients(), strategy, (SHARDS,)).inputs
    assert {record.kind for record in cut if record.shard is not None} == kinds
    assert all(record.shape for record in cut if record.shard is not None)
    assert all(record.shard is not None for record in cut if record.kind in kinds and record.shape)
