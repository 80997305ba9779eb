"""Collectives inside a compiled step: equal to eager, bit for bit, and the same few operators in the generated code.

Every step is called three times with other inputs, eagerly and compiled, on every rank; what it returns and what it
leaves in its arguments must be equal. Then the text that runs is looked at.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed import all_reduce as imported_early
from torch.distributed import distributed_c10d

from tests.conformance.collectives.compiled_steps import (
    COLUMNS,
    ROWS,
    Step,
    c10d,
    compared,
    copies,
    count,
    group_size,
    run,
)

row = functools.partial(pytest.mark.row, "S6")
CASES: list[Any] = []


def case(*rows: str, **counts: int) -> Callable[[Step], Step]:
    """A step that stands for rows of the table; its text calls each operator, or copies, so many times."""

    def register(step: Step) -> Step:
        CASES.append(pytest.param(step, counts, id=step.__name__, marks=[row(name) for name in rows]))  # type: ignore[attr-defined]
        return step

    return register


@case("allreduce_inductor", all_reduce_=1, wait_tensor=1)
def matmul_cat_reduce(x: Tensor, y: Tensor) -> Tensor:
    joined = torch.cat((x @ y.t(), y @ x.t()))
    reduced = funcol.all_reduce(joined, "sum", dist.group.WORLD)
    return reduced + (x @ x.t()).repeat(2, 1)


def square_and_reduce(x: Tensor, y: Tensor) -> Tensor:
    squared = x * x
    dist.all_reduce(squared, op=dist.ReduceOp.SUM)
    return torch.nn.functional.silu(x) * squared


@row("allreduce_inductor_cudagraph_trees")
def test_every_size_has_one_graph_used_again(ranks2: Any) -> None:
    """Three sizes, three calls each, and then the sizes mixed: every size has one graph, used again."""
    run(ranks2, square_and_reduce, [4, 4, 4, 8, 8, 8, 16, 16, 16, 4, 16, 8])


@row("c10d_functional_tagged_pt2_compliant")
def test_functional_collectives_are_tagged_as_safe_to_trace() -> None:
    operators = [c10d.all_reduce.default, c10d.wait_tensor.default, torch.ops.wholestep.reduce.default]
    operators += [getattr(torch.ops.wholestep, name).default for name in ("gather", "scatter", "exchange", "barrier")]
    assert all(torch.Tag.pt2_compliant_tag in operator.tags for operator in operators)


@case("allreduce_input_buffer_reuse", all_reduce_=0)
def input_read_again(x: Tensor, y: Tensor) -> Tensor:
    reduced = funcol.all_reduce(x, "sum", dist.group.WORLD)
    positive = torch.relu(x)
    return positive @ positive.t() + reduced @ y.t()


@case("allgather_output_buffer_reuse")
def gather_and_double(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    gathered = funcol.all_gather_tensor(x, 0, dist.group.WORLD)
    return torch.relu(gathered) + gathered, gathered.sum() + y


@case("allgather_contiguous_input")
def gather_transposed(x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
    turned = (x * 2).t()
    parts = [torch.empty(COLUMNS, ROWS, device=x.device) for _ in range(group_size())]
    dist.all_gather(parts, turned.contiguous())
    return funcol.all_gather_tensor(turned.contiguous(), 0, dist.group.WORLD) * 1, parts


@case(
    "allgather_into_tensor_inductor",
    "dynamo_rewrite_dist_all_gather",
    all_gather_into_tensor=1,
    wait_tensor=1,
    copies=0,
)
def gather_into(x: Tensor, y: Tensor) -> Tensor:
    out = x.new_empty(group_size() * ROWS, COLUMNS)
    dist.all_gather_into_tensor(out, x * y)
    return torch.relu(out) + 1


@case(
    "reduce_scatter_tensor_inductor",
    "dynamo_rewrite_dist_reduce_scatter",
    reduce_scatter_tensor=1,
    wait_tensor=1,
    copy_=0,
)
def scatter_reduced(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x)
    dist.reduce_scatter_tensor(out, torch.cat([x, y] * (group_size() // 2)))
    return out @ y.t()


def exchange_rows(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """How many rows go where is what the data says: one or more to each rank, others in every call."""
    given = (x[: group_size(), 0].abs() * 1.5).clamp(min=1, max=2 * ROWS // group_size()).long()
    received = torch.empty_like(given)
    dist.all_to_all_single(received, given)
    sizes_out, sizes_in = received.tolist(), given.tolist()
    for size in (*sizes_out, *sizes_in):
        torch._check(size >= 0)
    out = x.new_empty(sum(sizes_out), COLUMNS)
    dist.all_to_all_single(out, torch.cat([x, y])[: sum(sizes_in)], sizes_out, sizes_in)
    return out * 2, out.sum(0)


@row("all_to_all_single_inductor")
def test_split_sizes_that_are_data_are_nodes(ranks2: Any) -> None:
    data_as_sizes(ranks2)


@row("all_to_all_single_inductor")
def test_split_sizes_that_are_data_are_nodes_on_four_ranks(ranks4: Any) -> None:
    data_as_sizes(ranks4)


def data_as_sizes(pool: Any) -> None:
    text = run(pool, exchange_rows)
    assert count(text, "all_to_all_single") == 2
    assert re.search(r"all_to_all_single\.default\(\w+, \[_local_scalar_dense\w*", text), "the sizes must be nodes"


@case(
    "all_to_all_single_inductor_split_sizes_none",
    "dynamo_rewrite_dist_all_to_all_single",
    all_to_all_single=1,
    wait_tensor=1,
    copies=0,
)
def exchange_evenly(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x @ y.t() @ y)
    return out + 1


@case("inductor_single_op", all_reduce_=1, copies=0)
def one_collective(x: Tensor, y: Tensor) -> Tensor:
    """No copy of its output: the sum is reduced where it lies, and that is what is returned."""
    z = x + 1
    dist.all_reduce(z)
    return z


@case("inductor_steal_buffer", all_reduce_=1, all_reduce=0, copies=0)
def last_reader(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    z = x + 1
    dist.all_reduce(z)
    return z, torch.ones_like(x) + 22


@case("inductor_doesnt_mutate_shared", all_reduce_=0, all_reduce=1, copies=0)
def read_again(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    z = x + 1
    reduced = funcol.all_reduce(z, "sum", dist.group.WORLD)
    return reduced, z + 2


@case(
    "inductor_all_gather_coalesced",
    "dynamo_trace_allgather_coalesced",
    all_gather_into_tensor_coalesced=1,
    wait_tensor=2,
    copies=0,
)
def gather_two(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    z = x + 1
    first, second = c10d.all_gather_into_tensor_coalesced([z, y], group_size(), dist.group.WORLD.group_name)
    again = z + 2
    return c10d.wait_tensor(first), again, torch.ones_like(x) + 22, c10d.wait_tensor(second)


@case("inductor_reduce_scatter_coalesced", reduce_scatter_tensor_coalesced=1, wait_tensor=2, copies=0)
def scatter_two(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    z = x + 1
    name, size = dist.group.WORLD.group_name, group_size()
    first, second = c10d.reduce_scatter_tensor_coalesced([z, y], "sum", size, name)
    again = z + 2
    return c10d.wait_tensor(first), again, torch.ones_like(x) + 22, c10d.wait_tensor(second)


@case("dynamo_trace_allreduce", all_reduce=1, wait_tensor=1)
def functional_reduce(x: Tensor, y: Tensor) -> Tensor:
    return funcol.all_reduce(x, "sum", dist.group.WORLD) + 0


@case("dynamo_trace_all_gather_tensor", all_gather_into_tensor=1, wait_tensor=1)
def functional_gather(x: Tensor, y: Tensor) -> Tensor:
    return funcol.all_gather_tensor(x, 0, list(range(group_size()))) + 0


@case("dynamo_trace_all_gather_tensor_pg", all_gather_into_tensor=1, wait_tensor=1)
def functional_gather_group(x: Tensor, y: Tensor) -> Tensor:
    return funcol.all_gather_tensor(x, 1, dist.group.WORLD) + 0


@case("dynamo_trace_reduce_scatter_tensor", reduce_scatter_tensor=1, wait_tensor=1)
def functional_scatter(x: Tensor, y: Tensor) -> Tensor:
    return funcol.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD) + 0


@case("dynamo_rewrite_dist_all_gather_list", all_gather_into_tensor=1, wait_tensor=1, copies=0)
def gather_list(x: Tensor, y: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(x) for _ in range(group_size())]
    dist.all_gather(parts, x * 2)
    return [part + 1 for part in parts]


@case("dynamo_rewrite_dist_all_gather_args_match", all_gather_into_tensor=1)
def gather_keywords(x: Tensor, y: Tensor) -> Tensor:
    out = x.new_empty(group_size() * ROWS, COLUMNS)
    dist.all_gather_into_tensor(async_op=False, group=dist.group.WORLD, input_tensor=x, output_tensor=out)
    return out


@case("dynamo_rewrite_dist_allreduce", all_reduce_=1, wait_tensor=1, copies=0)
def reduce_positional(x: Tensor, y: Tensor) -> Tensor:
    dist.all_reduce(y := x * 1, dist.ReduceOp.SUM, dist.group.WORLD)
    return y


@case("dynamo_rewrite_dist_allreduce", all_reduce_=1, wait_tensor=1, copies=0)
def reduce_none(x: Tensor, y: Tensor) -> Tensor:
    dist.all_reduce(y := x * 1, dist.ReduceOp.SUM, None)
    return y


@case("dynamo_rewrite_dist_allreduce", all_reduce_=1, wait_tensor=1, copies=0)
def reduce_keyword(x: Tensor, y: Tensor) -> Tensor:
    dist.all_reduce(tensor=(y := x * 1), group=dist.group.WORLD)
    return y


@case("dynamo_rewrite_dist_allreduce", all_reduce_=1, wait_tensor=1, copies=0)
def reduce_absent(x: Tensor, y: Tensor) -> Tensor:
    dist.all_reduce(y := x * 1)
    return y


@case("dynamo_rewrite_dist_allreduce", all_reduce_=1, wait_tensor=1, copies=0)
def reduce_imported_early(x: Tensor, y: Tensor) -> Tensor:
    imported_early(y := x * 1)
    return y


@case("dynamo_rewrite_dist_allreduce", all_reduce_=1, wait_tensor=1, copies=0)
def reduce_on_the_group(x: Tensor, y: Tensor) -> Tensor:
    dist.group.WORLD.allreduce([y := x * 1]).wait()
    return y


def reduced_with(name: str) -> str:
    def step(x: Tensor, y: Tensor) -> Tensor:
        z = x * 1.5
        dist.all_reduce(z, getattr(dist.ReduceOp, name))
        return z

    return compared(step)


@row("dynamo_rewrite_dist_allreduce_reduce_op")
@pytest.mark.parametrize("name", ["SUM", "AVG", "PRODUCT", "MIN", "MAX"])
def test_every_reduce_operation_is_in_the_text(ranks2: Any, name: str) -> None:
    (text, _) = ranks2.run(reduced_with, name)
    assert f"'{name.lower()}'" in text


@case("dynamo_get_world_group", all_reduce_=1, copies=0)
def world_of_groupmember(x: Tensor, y: Tensor) -> None:
    dist.all_reduce(x, group=dist.GroupMember.WORLD)


@case("dynamo_get_world_group", all_reduce_=1, copies=0)
def world_of_group(x: Tensor, y: Tensor) -> None:
    dist.all_reduce(x, group=dist.group.WORLD)


@case("dynamo_get_world_group", all_reduce_=1, copies=0)
def world_by_default(x: Tensor, y: Tensor) -> None:
    dist.all_reduce(x, group=distributed_c10d._get_default_group())


@case("dynamo_support_collective_op_with_async_op_False", reduce_scatter_tensor=1, wait_tensor=1, copies=0)
def scatter_at_once(x: Tensor, y: Tensor) -> Tensor:
    out = x.new_empty(ROWS // group_size(), COLUMNS)
    dist.reduce_scatter_tensor(out, x, async_op=False)
    return out


def scatter_and_wait(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    out = x.new_empty(ROWS // group_size(), COLUMNS)
    work = dist.reduce_scatter_tensor(out, x, async_op=True)
    hides_it = y @ y.t()
    work.wait()
    return out, hides_it


@pytest.mark.parametrize(("step", "counts"), CASES)
def test_step_equals_eager_code_and_calls_no_operator_more(ranks2: Any, step: Step, counts: dict[str, int]) -> None:
    text = run(ranks2, step)
    assert {name: copies(text) if name == "copies" else count(text, name) for name in counts} == counts
