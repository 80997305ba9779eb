"""Sharded strategies on real ranks: what lives between calls, what travels, and what eager code sees."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import wholestep as ws
from wholestep.capture.capture import capture
from wholestep.cli.suite.workloads import draw_tokens
from wholestep.cli.workloads.reference_lm import LanguageModelSize, build
from wholestep.config import Strategy
from wholestep.ir import node_meta, op_info
from wholestep.ir.node_meta import BucketKind
from wholestep.runtime.options import data_axes
from wholestep.runtime.sharding.replace_references import ReplacedParameter
from wholestep.runtime.sharding.shard_live import LiveSharding

pytestmark = pytest.mark.ranks

EVEN = LanguageModelSize(num_layers=2, width=32, num_heads=2, vocabulary=64, length=8, rows=2)
UNEVEN = LanguageModelSize(num_layers=2, width=33, num_heads=1, vocabulary=65, length=7, rows=2)
SIZES = {"even": EVEN, "uneven": UNEVEN}


def adamw(params: Any) -> Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, foreach=True)


def train_step(model: Any, opt: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = model(x, y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    return loss.detach()


def training(size: LanguageModelSize) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = build(size, torch.device("cpu"))
    return model, adamw(model.parameters())


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def batch(size: LanguageModelSize, call: int) -> tuple[Tensor, Tensor]:
    return draw_tokens(size, 10 * call + dist.get_rank())


def collectives(step: ws.CompiledStep) -> dict[str, int]:
    nodes = [node for node in step.program().graph.nodes if op_info.is_collective(node)]
    return dict(Counter(str(node.target).split(".")[1].rstrip("_") for node in nodes))


def held_between_calls(strategy: Strategy) -> tuple[list[str], list[str], list[tuple[int, ...]]]:
    """Types of the parameters and of the optimizer's state, and shapes of what this rank holds of the latter."""
    model, opt = training(UNEVEN)
    step = ws.compile(train_step, strategy=strategy, backend="eager", fullgraph=True)
    step(model, opt, *batch(UNEVEN, 0))
    held = [opt.state[param]["exp_avg"] for param in model.parameters()]
    assert all(a is b for a, b in zip(model.parameters(), opt.param_groups[0]["params"], strict=True))
    local = [tuple(one.to_local().shape) for one in held if isinstance(one, DTensor)]
    return [type(one).__name__ for one in model.parameters()], [type(one).__name__ for one in held], local


def test_what_each_strategy_cuts(pool2: Any) -> None:
    for params, state, _ in pool2.run(held_between_calls, ws.FSDP()):
        assert set(params) == set(state) == {"DTensor"}
    for rank, (params, state, local) in enumerate(pool2.run(held_between_calls, ws.ZeRO())):
        assert set(params) == {"Parameter"}
        assert set(state) == {"DTensor"}
        assert local[0] == ((33, 33), (32, 33))[rank]  # of 65 rows


def texts_and_guards() -> tuple[bool, bool]:
    """Whether a sharded model is captured as the plain one, and whether its state has a native guard."""
    world, given = ws.init(), batch(EVEN, 0)
    model, opt = training(EVEN)
    plain = capture(train_step, (model, opt, *given), {})
    LiveSharding(train_step)((model, opt, *given), {}, ws.FSDP(), world.mesh, data_axes(world, None))  # type: ignore[arg-type]
    sharded = capture(train_step, (model, opt, *given), {})
    native = [one.guards.fast.state is not None for one in (plain, sharded)]
    return plain.program.module.code == sharded.program.module.code, native[0] == native[1]


def test_a_sharded_model_has_the_text_of_the_plain_one(pool2: Any) -> None:
    assert pool2.run(texts_and_guards) == [(True, True)] * 2


POLICIES = {
    "reduced in float32": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "reduced in bfloat16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "float32 but for reductions": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
}


def mixed(name: str) -> tuple[float, set[torch.dtype], set[torch.dtype]]:
    """Steps under a policy of types, beside eager fully_shard: what differs most, and what is gathered and reduced."""
    model, opt = training(UNEVEN)
    other, _ = training(UNEVEN)
    for unit in (*other.blocks, other):  # type: ignore[union-attr]
        fully_shard(unit, mesh=ws.init().mesh, mp_policy=POLICIES[name])
    other_opt = adamw(other.parameters())
    step = ws.compile(train_step, strategy=ws.FSDP(mp_policy=POLICIES[name]), backend="eager", fullgraph=True)
    differences = []
    for call in range(4):
        given = batch(UNEVEN, call)
        differences.append(step(model, opt, *given) - train_step(other, other_opt, *given))
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    differences += [whole(one) - whole(their) for one, their in pairs]
    buckets = [(node, record) for node in step.program().graph.nodes if (record := node_meta.bucket(node)) is not None]
    gathered, reduced = (
        {next(node_meta.tensors(node)).dtype for node, record in buckets if record.kind is kind}
        for kind in (BucketKind.GATHER, BucketKind.SCATTER)
    )
    return max(float(one.abs().max()) for one in differences), gathered, reduced


@pytest.mark.parametrize(
    ("name", "gathered", "reduced"),
    [
        ("reduced in float32", torch.bfloat16, torch.float32),
        ("reduced in bfloat16", torch.bfloat16, torch.bfloat16),
        ("float32 but for reductions", torch.float32, torch.bfloat16),
    ],
)
def test_types_of_a_policy_are_those_of_fully_shard(
    pool2: Any, name: str, gathered: torch.dtype, reduced: torch.dtype
) -> None:
    assert pool2.run(mixed, name) == [(0.0, {gathered}, {reduced})] * 2


def by_turns(size: str) -> tuple[float, int]:
    """Compiled and eager steps, evaluation and checkpoints by turns, beside eager fully_shard. What differs most."""
    model, opt = training(SIZES[size])
    other, _ = training(SIZES[size])
    for unit in (*other.blocks, other):  # type: ignore[union-attr]
        fully_shard(unit, mesh=ws.init().mesh, reshard_after_forward=True)
    other_opt = adamw(other.parameters())
    step = ws.compile(train_step, strategy=ws.FSDP(), backend="eager", fullgraph=True)
    differences = []
    for call in range(6):
        given = batch(SIZES[size], call)
        chosen = train_step if call % 3 == 1 else step
        differences.append(chosen(model, opt, *given) - train_step(other, other_opt, *given))
        with torch.no_grad():
            differences.append(model(*given) - other(*given))
        mine, theirs = get_state_dict(model, opt), get_state_dict(other, other_opt)
        differences += [whole(a) - whole(theirs[0][name]) for name, a in mine[0].items()]
    return max(float(one.abs().max()) for one in differences), step.cache_info().traces


@pytest.mark.parametrize("size", SIZES)
def test_eager_steps_evaluation_and_checkpoints_between_calls(pool2: Any, size: str) -> None:
    assert pool2.run(by_turns, size) == [(0.0, 1)] * 2  # eager fully_shard has the same arithmetic


def references() -> tuple[bool, bool, str]:
    """What holds parameters besides the model, after the first call."""
    model, opt = training(EVEN)
    listed = list(model.parameters())
    kept = (listed[0],)  # no one can put something else into a tuple
    outside = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for param in listed:
        outside.state[param]["momentum_buffer"] = torch.zeros_like(param)
    ids = id(opt), id(opt.param_groups), id(listed)
    step = ws.compile(train_step, strategy=ws.FSDP(), backend="eager", fullgraph=True)
    step(model, opt, *batch(EVEN, 0))
    new = list(model.parameters())
    moved = all(a is b for a, b in zip(listed, new, strict=True)) and list(outside.state) == new
    cut = all(isinstance(outside.state[one]["momentum_buffer"], DTensor) for one in new)
    assert ids == (id(opt), id(opt.param_groups), id(listed))
    assert isinstance(model, FSDPModule)
    assert isinstance(kept[0], ReplacedParameter)
    try:
        kept[0].sum()
    except ws.PlacementError as error:
        return moved, cut, str(error)
    return moved, cut, ""


def test_whoever_holds_a_parameter_holds_the_sharded_one(pool2: Any) -> None:
    for moved, cut, error in pool2.run(references):
        assert moved
        assert cut
        assert "was replaced when its model was sharded" in error


def counted(strategy: Strategy) -> dict[str, int]:
    model, opt = training(EVEN)
    step = ws.compile(train_step, strategy=strategy, backend="eager", fullgraph=True)
    step(model, opt, *batch(EVEN, 0))
    return collectives(step)


def test_ranks_have_one_plan_and_no_rank_number(pool2: Any) -> None:
    plans = pool2.run(plan_of, ws.ZeRO())
    assert plans[0] == plans[1]


def plan_of(strategy: Strategy) -> str:
    model, opt = training(UNEVEN)
    step = ws.compile(train_step, strategy=strategy, backend="eager", fullgraph=True)
    step(model, opt, *batch(UNEVEN, 0))
    return step.plan
