"""verify of sharded strategies: every rank holds its parts, and together they are the eager step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.fx as fx

import wholestep as ws
from tests.unit.builders import aten, c10d
from tests.unit.sharded_models import accumulate, batch, keep_gradients, leave_gradients, made, train
from wholestep.config import Strategy
from wholestep.ir import graph_edit, node_meta
from wholestep.ir.program import MeshAxis, Program, ShardSpec
from wholestep.runtime.verify.rank_shards import RankShards, RankValues
from wholestep.runtime.verify.verification import Outcome, Verification

Ranks = int | tuple[int, int]

STRATEGIES: dict[str, Strategy] = {
    "fsdp_keep": ws.FSDP(reshard_after_forward=False),
    "fsdp_again": ws.FSDP(reshard_after_forward=True),
    "zero1": ws.ZeRO(),
    "zero2": ws.ZeRO(stage=2),
}
PASSED = [Outcome.PASSED] * 4


def verified(
    strategy: Strategy,
    model: str = "mlp",
    width: int = 8,
    optimizer: str = "adamw_foreach",
    *,
    step: Callable[..., Any] = train,
    ranks: Ranks = 2,
    passes: Any = None,
) -> Verification:
    compiled = ws.compile(step, strategy=strategy, passes=passes)
    return compiled.verify(*made(model, width, optimizer), *batch(model), ranks=ranks)


def outcomes(found: Verification) -> list[Outcome]:
    """Of programs; what is compiled is for `test_kernel_check`."""
    return [check.outcome for check in found.checks[:4]]


@pytest.mark.parametrize(("ranks", "width"), [(2, 8), (2, 7), (3, 7), (4, 7), ((2, 2), 7)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_with_parts_take_the_eager_step(strategy: str, ranks: Ranks, width: int) -> None:
    found = verified(STRATEGIES[strategy], width=width, ranks=ranks)
    assert outcomes(found) == PASSED, str(found)


OPTIMIZERS, STEPS = ("sgd", "adamw_single", "adamw_fused"), (train, accumulate, keep_gradients)
PAIRS = [
    (strategy, step, OPTIMIZERS[(i + j + more) % len(OPTIMIZERS)])
    for i, strategy in enumerate(STRATEGIES)
    for j, step in enumerate(STEPS)
    for more in (0, 1)
]
"""Each two of them meet."""


@pytest.mark.parametrize(("strategy", "step", "optimizer"), PAIRS)
def test_optimizers_and_accumulation(strategy: str, step: Callable[..., Any], optimizer: str) -> None:
    found = verified(STRATEGIES[strategy], width=7, optimizer=optimizer, step=step, ranks=3)
    assert outcomes(found) == PASSED, str(found)


@pytest.mark.parametrize("ranks", [2, (2, 2)])
@pytest.mark.parametrize("strategy", ["ddp", *STRATEGIES])
def test_gradients_that_a_step_leaves_to_its_user(strategy: str, ranks: Ranks) -> None:
    """Where they stay whole, the bucket of a second axis reduces what the one of the first axis gives."""
    found = verified(STRATEGIES.get(strategy, ws.DDP()), width=7, step=leave_gradients, ranks=ranks)
    assert outcomes(found)[:3] == PASSED[:3], str(found)


@pytest.mark.parametrize(("model", "ranks", "width"), [("gpt", (2, 2), 7), ("tied", 3, 7), ("tied", 2, 8)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_models(strategy: str, model: str, ranks: Ranks, width: int) -> None:
    found = verified(STRATEGIES[strategy], model, width, ranks=ranks)
    assert outcomes(found) == PASSED, str(found)


@pytest.mark.parametrize(("ranks", "width"), [(2, 8), ((2, 2), 7)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_batch_norm_has_statistics_of_each_rank(strategy: str, ranks: Ranks, width: int) -> None:
    found = verified(STRATEGIES[strategy], "conv", width, "sgd", ranks=ranks)
    assert outcomes(found) == [*PASSED[:3], Outcome.SKIPPED], str(found)


def test_a_dim_that_is_not_the_first() -> None:
    strategy = ws.FSDP(shard_placement_fn=lambda one: torch.distributed.tensor.Shard(one.dim() - 1))
    found = verified(strategy, width=7, ranks=3)
    assert outcomes(found) == PASSED, str(found)


def test_what_is_ignored_stays_whole_and_local() -> None:
    found = verified(ws.FSDP(ignore=("2.weight",)))
    assert [one.outcome for one in found.checks[:3]] == PASSED[:3], str(found)


# ---- faults are found --------------------------------------------------------------------------------------------


def starts(program: Program, target: Any) -> Iterator[fx.Node]:
    return iter(program.graph.find_nodes(op="call_function", target=target))


def with_a_wrong_divisor(program: Program) -> Program:
    start = next(starts(program, c10d.reduce_scatter_tensor.default))
    scaled = start.args[0]
    scaled.args = (scaled.args[0], 2 * scaled.args[1])
    return program


def with_another_order_of_parts(program: Program) -> Program:
    """Whoever reads the first gathered parameter gets its rows rolled by those of one rank."""
    start = next(starts(program, c10d.all_gather_into_tensor.default))
    (wait,) = start.users
    readers = list(wait.users)
    with program.graph.inserting_after(wait):
        rows = node_meta.tensor(start.args[0]).shape[0]
        rolled = graph_edit.emit(program.graph, aten.roll.default, wait, [rows], [0], like=wait)
    for reader in readers:
        reader.replace_input_with(wait, rolled)
    return program


def without_the_sum_over_replicas(program: Program) -> Program:
    scattered = {user for start in starts(program, c10d.reduce_scatter_tensor.default) for user in start.users}
    start = next(one for one in starts(program, c10d.all_reduce.default) if one.args[0] in scattered)
    (wait,) = start.users
    graph_edit.replace_node(wait, start.args[0])
    program.graph.erase_node(start)
    return program


def failed(found: Verification, name: str) -> str:
    check = next(check for check in found.checks if check.name == name)
    assert check.outcome is Outcome.FAILED, str(found)
    return check.text


def placed_first(fault: Callable[[Program], Program]) -> Any:
    return ws.default_passes(extra=fault)


@pytest.mark.parametrize("fault", [with_a_wrong_divisor, with_another_order_of_parts])
@pytest.mark.parametrize("width", [8, 7])
def test_a_fault_of_a_pass_is_found(fault: Callable[[Program], Program], width: int) -> None:
    # As large as a gradient, so that every bucket holds one and is what placement has made.
    found = verified(ws.FSDP(bucket_bytes=1), width=width, ranks=3, passes=placed_first(fault))
    assert "differs after step 1" in failed(found, "optimised = unoptimised")


def test_replicas_that_are_not_summed_over_end_unequal() -> None:
    # One bit is enough, and the other two checks would tell the same fault first.
    passes = placed_first(without_the_sum_over_replicas)
    found = verified(ws.FSDP(bucket_bytes=1), optimizer="sgd", ranks=(2, 2), passes=passes)
    assert "rank 2 holds other values of" in failed(found, "ranks end equal")
    assert "than rank 0" in failed(found, "ranks end equal")


# ---- parts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("length", [1, 4, 5, 7])
def test_parts_are_those_of_chunk_and_make_the_whole_again(length: int, dim: int) -> None:
    shape = (length, 2) if dim == 0 else (2, length)
    whole = torch.arange(2.0 * length).view(shape) + 1
    spec = ShardSpec(axis="data", num_ranks=3, dim=dim, whole_shape=shape)
    shards = RankShards(MeshAxis(name="data", size=3, group="g"), 3)
    parts = [shards.cut(whole, spec, rank) for rank in range(3)]
    assert {tuple(part.shape) for part in parts} == {spec.shard_shape}
    chunks = whole.chunk(3, dim)
    for rank, part in enumerate(parts):
        wanted = chunks[rank] if rank < len(chunks) else whole.narrow(dim, 0, 0)
        assert torch.equal(shards.valid(part, spec, rank), wanted)
        assert part.sum() == wanted.sum()  # padding is zeros
        part.narrow(dim, wanted.shape[dim], part.shape[dim] - wanted.shape[dim]).fill_(float("nan"))
    assert torch.equal(shards.whole(parts, spec), whole)


def test_over_two_axes_parts_are_equal_over_the_second() -> None:
    shards = RankShards(MeshAxis(name="stride 1", size=2, group="g"), 4)
    spec = ShardSpec(axis="stride 1", num_ranks=2, dim=0, whole_shape=(4,))
    assert [shards.position(rank) for rank in range(4)] == [0, 1, 0, 1]
    assert [shards.first_alike(rank, spec) for rank in range(4)] == [0, 1, 0, 1]
    assert [shards.first_alike(rank, None) for rank in range(4)] == [0] * 4
    parts = [torch.full((2,), float(rank)) for rank in range(4)]
    assert shards.whole(parts, spec).tolist() == [0, 0, 1, 1]
    assert shards.whole(parts, spec, 2).tolist() == [2, 2, 3, 3]


def test_values_are_cut_and_made_whole_as_programs_take_them() -> None:
    values = RankValues(RankShards(MeshAxis(name="data", size=2, group="g"), 2))
    spec = ShardSpec(axis="data", num_ranks=2, dim=0, whole_shape=(3,))
    for of_rank in values.by_rank:
        of_rank[7] = torch.tensor([1.0, 2.0, 3.0])
    values.cut_as(7, spec)
    assert [one[7].tolist() for one in values.by_rank] == [[1, 2], [3, 0]]
    values.cut_as(7, replace(spec))
    assert values.specs == {7: spec}
    values.cut_as(7, None)
    assert [one[7].tolist() for one in values.by_rank] == [[1, 2, 3]] * 2
    assert values.specs == {}
