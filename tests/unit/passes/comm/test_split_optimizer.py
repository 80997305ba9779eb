"""Updates that are split by bucket, and the order that follows from it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from tests.unit import builders
from tests.unit.builders import aten, gradient
from wholestep.cost.cost_model import CostModel
from wholestep.ir import node_meta, op_info
from wholestep.ir.program import Program
from wholestep.passes.comm.bucketing import bucket_gradients
from wholestep.passes.comm.split_optimizer import split_optimizer
from wholestep.passes.default_passes import passes_of
from wholestep.passes.pass_manager import run_passes
from wholestep.passes.rewrites.dead_code import eliminate_dead_code

COST = CostModel.default("cpu+gloo")
SIZES = [(4, 3), (5,), (6,), (2, 7), (1,)]
LIMIT_BYTES = 40


def state(kinds: int) -> list[torch.Tensor]:
    """Parameters, `kinds` kinds of optimizer state with their shapes, counters, and what gradients are made of."""
    torch.manual_seed(0)
    tensors = [torch.rand(size) for _ in range(1 + kinds) for size in SIZES]
    return [*tensors, *(torch.tensor(2.0) for _ in SIZES), *(torch.randn(size) for size in SIZES)]


def step(kind: str, *, clip: bool = False):
    """Gradients from the last parameter to the first, then an optimizer over all of them at once."""

    def fn(*tensors: torch.Tensor) -> tuple[()]:
        count = len(SIZES)
        rows = [list(tensors[start : start + count]) for start in range(0, len(tensors), count)]
        params, states, steps, raw = rows[0], rows[1:-2], rows[-2], rows[-1]
        made = {i: gradient(raw[i] * 2, f"p{i}") for i in reversed(range(count))}
        grads = [made[i] for i in range(count)]
        if clip:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
            torch._foreach_mul_(grads, torch.clamp(1.0 / (norm + 1e-6), max=1.0))
        if kind == "sgd":
            sgd(params, grads, states[0], foreach=True, weight_decay=0.1, momentum=0.9, lr=0.1, dampening=0.0,
                nesterov=True, maximize=False)  # fmt: skip
        elif kind == "fused":
            torch._fused_adamw_(
                params, grads, states[0], states[1], [], steps, lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.1,
                eps=1e-8, amsgrad=False, maximize=False,
            )  # fmt: skip
        else:
            adamw(
                params, grads, states[0], states[1], [], steps, foreach=True, capturable=False, amsgrad=False,
                beta1=0.9, beta2=0.99, lr=0.1, weight_decay=0.1, eps=1e-8, maximize=False,
            )  # fmt: skip
        return ()

    return fn


def split(kind: str, *, clip: bool = False) -> tuple[Program, Program]:
    """Before and after, which give the same bits, also when scheduled and run in place."""
    tensors = state(1 if kind == "sgd" else 2)
    placed = builders.place(builders.capture(step(kind, clip=clip), tensors))
    before = run_passes(placed, [eliminate_dead_code, partial(bucket_gradients, cost=COST, bucket_bytes=LIMIT_BYTES)])
    after = run_passes(before, [split_optimizer])
    wanted = builders.execute(placed, tensors)
    assert builders.same(builders.execute(after, tensors), wanted)
    whole = run_passes(placed, passes_of(cost=COST, bucket_bytes=LIMIT_BYTES))
    assert builders.same(builders.execute(whole, tensors), wanted)
    return before, after


def num_buckets(program: Program) -> int:
    return sum(node_meta.bucket(node) is not None for node in program.graph.nodes)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "adamw", "fused"])
def test_every_call_on_all_parameters_becomes_one_per_bucket(kind, clip):
    before, after = split(kind, clip=clip)
    buckets = num_buckets(before)
    assert buckets == 3
    names = builders.calls(after)
    lists = {name: names.count(name) for name in names if "_foreach_" in name or "_fused_" in name}
    before_lists = builders.calls(before)
    for name, count in lists.items():
        assert count in (before_lists.count(name), buckets * before_lists.count(name)), name
    assert any(count == buckets * before_lists.count(name) for name, count in lists.items())


def test_a_norm_is_made_of_norms_of_buckets():
    _, after = split("sgd", clip=True)
    assert builders.count(after, aten._foreach_norm.Scalar) == 3
    assert builders.count(after, aten.stack.default) == 1


def test_an_update_reads_one_bucket_and_no_more():
    """Without clipping nothing but its own bucket stands before an update: it can run while others are under way."""
    _, after = split("fused")
    for node in after.graph.nodes:
        if op_info.is_indexwise(node.target) and "_fused_" in str(node.target):
            assert len(waits_before(node)) == 1


def waits_before(node: torch.fx.Node) -> set[torch.fx.Node]:
    found, stack = set(), [node]
    while stack:
        for arg in stack.pop().all_input_nodes:
            if arg not in found:
                found.add(arg)
                stack.append(arg)
    return {one for one in found if one.target is op_info.WAIT}


def test_one_bucket_is_left_alone():
    tensors = state(2)
    placed = builders.place(builders.capture(step("fused"), tensors))
    bucketed = run_passes(placed, [partial(bucket_gradients, cost=COST, bucket_bytes=1 << 30)])
    assert run_passes(bucketed, [split_optimizer]).history[-1].notes == ()


def test_a_list_that_is_used_as_a_whole_is_left_alone():
    def fn(a, b):
        made = [gradient(a * 2, "a"), gradient(b * 2, "b")]
        return (torch.stack(torch._foreach_add(made, 1.0)),)

    tensors = [torch.randn(3), torch.randn(3)]
    placed = builders.place(builders.capture(fn, tensors))
    after = run_passes(placed, [split_optimizer])
    assert builders.same(builders.execute(after, tensors), builders.execute(placed, tensors))
