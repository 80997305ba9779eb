"""Collectives inside a compiled step: equal to eager, bit for bit, and the same few operators in the generated code.

Every step is called three times with other inputs, eagerly and compiled, on every rank; what it returns and what it
leaves in its arguments must be equal. Then the text that runs is looked at.
"""

from __future__ import annotations

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

import wholestep as ws
from tests.harness.equality import equal
from wholestep.ir.printer import source
from wholestep.ir.program import Program

c10d = torch.ops._c10d_functional
row = pytest.mark.row
ROWS, COLUMNS, CALLS = 4, 6, 3

Step = Callable[[Tensor, Tensor], Any]


def tensors(call: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """The arguments of one call on this rank."""
    generator = torch.Generator().manual_seed(100 * call + dist.get_rank())
    device = ws.init().device
    return tuple(torch.randn(rows, COLUMNS, generator=generator).to(device) for _ in range(2))  # type: ignore[return-value]


def leaves(result: Any) -> list[Any]:
    if isinstance(result, (list, tuple)):
        return [leaf for one in result for leaf in leaves(one)]
    return [result]


def compared(step: Step, calls: list[int] | None = None) -> str:
    """Runs the step both ways and gives the text of the program that ran."""
    compiled = ws.compile(step)
    for call, rows in enumerate(calls or [ROWS] * CALLS):
        here, there = tensors(call, rows), tensors(call, rows)
        wanted, found = leaves((step(*here), here)), leaves((compiled(*there), there))
        assert len(wanted) == len(found)
        for position, (a, b) in enumerate(zip(wanted, found, strict=True)):
            assert equal(a, b), f"call {call}, value {position}: {a} is not {b}"
    assert compiled.cache_info().traces == len(set(calls or [ROWS]))
    return text_of(compiled.program())


def text_of(program: Program) -> str:
    return source(program, comments=False)


def count(text: str, name: str) -> int:
    """How often the operator is called."""
    return len(re.findall(rf"\b(?:_c10d_functional|aten|wholestep)\.{name}\.", text))


def copies(text: str) -> int:
    """Calls that do nothing but move bytes."""
    names = ("clone", "copy", "copy_", "_foreach_copy_", "empty_like", "contiguous", "cat", "stack")
    return sum(count(text, name) for name in names)


def group_size() -> int:
    return dist.get_world_size()


def run(pool: Any, step: Step, *rest: Any) -> list[str]:
    """The texts of the ranks, which are the same."""
    texts = pool.run(compared, step, *rest)
    assert len(set(texts)) == 1, "the text of the graph depends on the rank"
    return texts[0]


# ---- compute around a collective ---------------------------------------------------------------------------------


def matmul_cat_reduce(x: Tensor, y: Tensor) -> Tensor:
    joined = torch.cat((x @ y.t(), y @ x.t()))
    reduced = funcol.all_reduce(joined, "sum", dist.group.WORLD)
    return reduced + (x @ x.t()).repeat(2, 1)


@row("S6", "allreduce_inductor")
def test_allreduce_inductor(ranks2: Any) -> None:
    text = run(ranks2, matmul_cat_reduce)
    assert [count(text, "all_reduce_"), count(text, "wait_tensor")] == [1, 1]


def square_and_reduce(x: Tensor, y: Tensor) -> Tensor:
    squared = x * x
    dist.all_reduce(squared, op=dist.ReduceOp.SUM)
    return torch.nn.functional.silu(x) * squared


@row("S6", "allreduce_inductor_cudagraph_trees")
def test_allreduce_inductor_cudagraph_trees(ranks2: Any) -> None:
    """Three sizes, three calls each, and then the sizes mixed: every size has one graph, used again."""
    run(ranks2, square_and_reduce, [4, 4, 4, 8, 8, 8, 16, 16, 16, 4, 16, 8])


@row("S6", "c10d_functional_tagged_pt2_compliant")
def test_c10d_functional_tagged_pt2_compliant() -> None:
    operators = [c10d.all_reduce.default, c10d.wait_tensor.default, torch.ops.wholestep.reduce.default]
    operators += [getattr(torch.ops.wholestep, name).default for name in ("gather", "scatter", "exchange", "barrier")]
    assert all(torch.Tag.pt2_compliant_tag in operator.tags for operator in operators)


# ---- started here, awaited there ---------------------------------------------------------------------------------


def wait_and_add(under_way: Tensor, x: Tensor) -> Tensor:
    return c10d.wait_tensor(under_way) + (x @ x.t()).sum()


def wait_for_the_input(under_way: Tensor, x: Tensor) -> Tensor:
    c10d.wait_tensor(under_way)  # what it gives is the tensor itself, which may be read in its place
    return under_way + x


def started_eagerly(step: Step) -> str:
    compiled, name = ws.compile(step), dist.group.WORLD.group_name
    for call in range(CALLS):
        x, y = tensors(call)
        found = compiled(c10d.all_reduce(x, "sum", name), y)
        assert torch.equal(found, step(c10d.all_reduce(x, "sum", name), y))
    return text_of(compiled.program())


@row("S6", "eager_allreduce_inductor_wait")
@pytest.mark.parametrize("step", [wait_and_add, wait_for_the_input])
def test_eager_allreduce_inductor_wait(ranks2: Any, step: Step) -> None:
    (text, _) = ranks2.run(started_eagerly, step)
    assert count(text, "wait_tensor") == 1


def reduce_only(x: Tensor, y: Tensor) -> Tensor:
    return c10d.all_reduce(torch.cat((x @ y.t(), y @ x.t())), "sum", dist.group.WORLD.group_name)


def gather_only(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    sent = x * 2
    return c10d.all_gather_into_tensor(sent, group_size(), dist.group.WORLD.group_name), y + 1


def awaited_eagerly(step: Step) -> str:
    compiled = ws.compile(step)
    for call in range(CALLS):
        x, y = tensors(call)
        found, wanted = leaves(compiled(x, y))[0], leaves(step(x, y))[0]
        assert torch.equal(c10d.wait_tensor(found), c10d.wait_tensor(wanted))
    return text_of(compiled.program())


@row("S6", "inductor_allreduce_eager_wait")
@pytest.mark.parametrize("step", [reduce_only, gather_only])
def test_inductor_allreduce_eager_wait(ranks2: Any, step: Step) -> None:
    (text, _) = ranks2.run(awaited_eagerly, step)
    assert count(text, "wait_tensor") == 0


def waits_for_a_handle(handle: list[Any]) -> str:
    def step(x: Tensor, y: Tensor) -> Tensor:
        handle[0].wait()
        return x + 1

    handle[:] = [dist.all_reduce(tensors(0)[0], async_op=True)]
    try:
        return refused(step)
    finally:
        handle[0].wait()


@row("S6", "eager_allreduce_inductor_wait")
def test_a_handle_from_outside_is_refused(ranks2: Any) -> None:
    assert "started outside of it" in ranks2.run(waits_for_a_handle, [])[0]


# ---- buffers that are used again ---------------------------------------------------------------------------------


def input_read_again(x: Tensor, y: Tensor) -> Tensor:
    reduced = funcol.all_reduce(x, "sum", dist.group.WORLD)
    positive = torch.relu(x)
    return positive @ positive.t() + reduced @ y.t()


@row("S6", "allreduce_input_buffer_reuse")
def test_allreduce_input_buffer_reuse(ranks2: Any) -> None:
    assert count(run(ranks2, input_read_again), "all_reduce_") == 0


def permuted(x: Tensor, y: Tensor) -> Tensor:
    # Each rank gives to the next one; the pairs are (place in the list, value).
    pairs = [(rank + 1) % group_size() for rank in range(group_size())]
    return funcol.permute_tensor((x * 2).reshape(-1), pairs, dist.group.WORLD).view(ROWS, COLUMNS) + y


@row("S6", "permute_tensor")
def test_permute_tensor(ranks2: Any) -> None:
    """Which rank sends to which is in the split sizes of this rank, so the texts differ; the plan is one."""
    ranks2.run(compared, permuted)


@row("S6", "permute_tensor")
def test_permute_tensor_on_four_ranks(ranks4: Any) -> None:
    ranks4.run(compared, permuted)


def gather_and_double(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    gathered = funcol.all_gather_tensor(x, 0, dist.group.WORLD)
    return torch.relu(gathered) + gathered, gathered.sum() + y


@row("S6", "allgather_output_buffer_reuse")
def test_allgather_output_buffer_reuse(ranks2: Any) -> None:
    run(ranks2, gather_and_double)


def gather_transposed(x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
    turned = (x * 2).t()
    parts = [torch.empty(COLUMNS, ROWS, device=x.device) for _ in range(group_size())]
    dist.all_gather(parts, turned.contiguous())
    return funcol.all_gather_tensor(turned.contiguous(), 0, dist.group.WORLD) * 1, parts


@row("S6", "allgather_contiguous_input")
def test_allgather_contiguous_input(ranks2: Any) -> None:
    run(ranks2, gather_transposed)


def gather_into(x: Tensor, y: Tensor) -> Tensor:
    out = x.new_empty(group_size() * ROWS, COLUMNS)
    dist.all_gather_into_tensor(out, x * y)
    return torch.relu(out) + 1


@row("S6", "allgather_into_tensor_inductor")
@row("S6", "dynamo_rewrite_dist_all_gather")
def test_allgather_into_tensor_inductor(ranks2: Any) -> None:
    text = run(ranks2, gather_into)
    assert [count(text, "all_gather_into_tensor"), count(text, "wait_tensor"), copies(text)] == [1, 1, 0]


def scatter_reduced(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x)
    dist.reduce_scatter_tensor(out, torch.cat([x, y] * (group_size() // 2)))
    return out @ y.t()


@row("S6", "reduce_scatter_tensor_inductor")
@row("S6", "dynamo_rewrite_dist_reduce_scatter")
def test_reduce_scatter_tensor_inductor(ranks2: Any) -> None:
    text = run(ranks2, scatter_reduced)
    assert [count(text, "reduce_scatter_tensor"), count(text, "wait_tensor"), count(text, "copy_")] == [1, 1, 0]


# ---- all_to_all_single -------------------------------------------------------------------------------------------


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


@row("S6", "all_to_all_single_inductor")
def test_all_to_all_single_inductor(ranks2: Any) -> None:
    data_as_sizes(ranks2)


@row("S6", "all_to_all_single_inductor")
def test_all_to_all_single_inductor_on_four_ranks(ranks4: Any) -> None:
    data_as_sizes(ranks4)


def data_as_sizes(pool: Any) -> None:
    text = run(pool, exchange_rows)
    assert count(text, "all_to_all_single") == 2
    assert re.search(r"all_to_all_single\.default\(\w+, \[_local_scalar_dense\w*", text), "the sizes must be nodes"


def exchange_evenly(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x @ y.t() @ y)
    return out + 1


@row("S6", "all_to_all_single_inductor_split_sizes_none")
@row("S6", "dynamo_rewrite_dist_all_to_all_single")
def test_all_to_all_single_inductor_split_sizes_none(ranks2: Any) -> None:
    text = run(ranks2, exchange_evenly)
    assert [count(text, "all_to_all_single"), count(text, "wait_tensor"), copies(text)] == [1, 1, 0]


# ---- what the generated code does with memory --------------------------------------------------------------------


def one_collective(x: Tensor, y: Tensor) -> Tensor:
    z = x + 1
    dist.all_reduce(z)
    return z


@row("S6", "inductor_single_op")
def test_inductor_single_op(ranks2: Any) -> None:
    """No copy of its output: the sum is reduced where it lies, and that is what is returned."""
    text = run(ranks2, one_collective)
    assert [count(text, "all_reduce_"), copies(text)] == [1, 0]


def last_reader(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    z = x + 1
    dist.all_reduce(z)
    return z, torch.ones_like(x) + 22


@row("S6", "inductor_steal_buffer")
def test_inductor_steal_buffer(ranks2: Any) -> None:
    text = run(ranks2, last_reader)
    assert [count(text, "all_reduce_"), count(text, "all_reduce"), copies(text)] == [1, 0, 0]


def read_again(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    z = x + 1
    reduced = funcol.all_reduce(z, "sum", dist.group.WORLD)
    return reduced, z + 2


@row("S6", "inductor_doesnt_mutate_shared")
def test_inductor_doesnt_mutate_shared(ranks2: Any) -> None:
    text = run(ranks2, read_again)
    assert [count(text, "all_reduce_"), count(text, "all_reduce"), copies(text)] == [0, 1, 0]


def gather_two(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    z = x + 1
    first, second = c10d.all_gather_into_tensor_coalesced([z, y], group_size(), dist.group.WORLD.group_name)
    again = z + 2
    return c10d.wait_tensor(first), again, torch.ones_like(x) + 22, c10d.wait_tensor(second)


@row("S6", "inductor_all_gather_coalesced")
@row("S6", "dynamo_trace_allgather_coalesced")
def test_inductor_all_gather_coalesced(ranks2: Any) -> None:
    text = run(ranks2, gather_two)
    assert [count(text, "all_gather_into_tensor_coalesced"), count(text, "wait_tensor"), copies(text)] == [1, 2, 0]


def scatter_two(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    z = x + 1
    name, size = dist.group.WORLD.group_name, group_size()
    first, second = c10d.reduce_scatter_tensor_coalesced([z, y], "sum", size, name)
    again = z + 2
    return c10d.wait_tensor(first), again, torch.ones_like(x) + 22, c10d.wait_tensor(second)


@row("S6", "inductor_reduce_scatter_coalesced")
def test_inductor_reduce_scatter_coalesced(ranks2: Any) -> None:
    text = run(ranks2, scatter_two)
    assert [count(text, "reduce_scatter_tensor_coalesced"), count(text, "wait_tensor"), copies(text)] == [1, 2, 0]


# ---- functional collectives in the step --------------------------------------------------------------------------


def functional_reduce(x: Tensor, y: Tensor) -> Tensor:
    return funcol.all_reduce(x, "sum", dist.group.WORLD) + 0


def functional_gather(x: Tensor, y: Tensor) -> Tensor:
    return funcol.all_gather_tensor(x, 0, list(range(group_size()))) + 0


def functional_gather_group(x: Tensor, y: Tensor) -> Tensor:
    return funcol.all_gather_tensor(x, 1, dist.group.WORLD) + 0


def functional_scatter(x: Tensor, y: Tensor) -> Tensor:
    return funcol.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD) + 0


def traced(pool: Any, step: Step, name: str) -> None:
    text = run(pool, step)
    assert [count(text, name), count(text, "wait_tensor")] == [1, 1]


@row("S6", "dynamo_trace_allreduce")
def test_dynamo_trace_allreduce(ranks2: Any) -> None:
    traced(ranks2, functional_reduce, "all_reduce")


@row("S6", "dynamo_trace_all_gather_tensor")
def test_dynamo_trace_all_gather_tensor(ranks2: Any) -> None:
    traced(ranks2, functional_gather, "all_gather_into_tensor")


@row("S6", "dynamo_trace_all_gather_tensor_pg")
def test_dynamo_trace_all_gather_tensor_pg(ranks2: Any) -> None:
    traced(ranks2, functional_gather_group, "all_gather_into_tensor")


@row("S6", "dynamo_trace_reduce_scatter_tensor")
def test_dynamo_trace_reduce_scatter_tensor(ranks2: Any) -> None:
    traced(ranks2, functional_scatter, "reduce_scatter_tensor")


# ---- in-place collectives, however they are called ---------------------------------------------------------------


def gather_list(x: Tensor, y: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(x) for _ in range(group_size())]
    dist.all_gather(parts, x * 2)
    return [part + 1 for part in parts]


@row("S6", "dynamo_rewrite_dist_all_gather_list")
def test_dynamo_rewrite_dist_all_gather_list(ranks2: Any) -> None:
    text = run(ranks2, gather_list)
    assert [count(text, "all_gather_into_tensor"), count(text, "wait_tensor"), copies(text)] == [1, 1, 0]


def gather_keywords(x: Tensor, y: Tensor) -> Tensor:
    out = x.new_empty(group_size() * ROWS, COLUMNS)
    dist.all_gather_into_tensor(async_op=False, group=dist.group.WORLD, input_tensor=x, output_tensor=out)
    return out


@row("S6", "dynamo_rewrite_dist_all_gather_args_match")
def test_dynamo_rewrite_dist_all_gather_args_match(ranks2: Any) -> None:
    assert count(run(ranks2, gather_keywords), "all_gather_into_tensor") == 1


def reduce_positional(x: Tensor, y: Tensor) -> Tensor:
    dist.all_reduce(y := x * 1, dist.ReduceOp.SUM, dist.group.WORLD)
    return y


def reduce_none(x: Tensor, y: Tensor) -> Tensor:
    dist.all_reduce(y := x * 1, dist.ReduceOp.SUM, None)
    return y


def reduce_keyword(x: Tensor, y: Tensor) -> Tensor:
    dist.all_reduce(tensor=(y := x * 1), group=dist.group.WORLD)
    return y


def reduce_absent(x: Tensor, y: Tensor) -> Tensor:
    dist.all_reduce(y := x * 1)
    return y


def reduce_imported_early(x: Tensor, y: Tensor) -> Tensor:
    imported_early(y := x * 1)
    return y


def reduce_on_the_group(x: Tensor, y: Tensor) -> Tensor:
    dist.group.WORLD.allreduce([y := x * 1]).wait()
    return y


@row("S6", "dynamo_rewrite_dist_allreduce")
@pytest.mark.parametrize(
    "step",
    [reduce_positional, reduce_none, reduce_keyword, reduce_absent, reduce_imported_early, reduce_on_the_group],
)
def test_dynamo_rewrite_dist_allreduce(ranks2: Any, step: Step) -> None:
    text = run(ranks2, step)
    assert [count(text, "all_reduce_"), count(text, "wait_tensor"), copies(text)] == [1, 1, 0]


def reduced_with(name: str) -> str:
    def step(x: Tensor, y: Tensor) -> Tensor:
        z = x * 1.5
        dist.all_reduce(z, getattr(dist.ReduceOp, name))
        return z

    return compared(step)


@row("S6", "dynamo_rewrite_dist_allreduce_reduce_op")
@pytest.mark.parametrize("name", ["SUM", "AVG", "PRODUCT", "MIN", "MAX"])
def test_dynamo_rewrite_dist_allreduce_reduce_op(ranks2: Any, name: str) -> None:
    (text, _) = ranks2.run(reduced_with, name)
    assert f"'{name.lower()}'" in text


def world_of_groupmember(x: Tensor, y: Tensor) -> None:
    dist.all_reduce(x, group=dist.GroupMember.WORLD)


def world_of_group(x: Tensor, y: Tensor) -> None:
    dist.all_reduce(x, group=dist.group.WORLD)


def world_by_default(x: Tensor, y: Tensor) -> None:
    dist.all_reduce(x, group=distributed_c10d._get_default_group())


@row("S6", "dynamo_get_world_group")
@pytest.mark.parametrize("step", [world_of_groupmember, world_of_group, world_by_default])
def test_dynamo_get_world_group(ranks2: Any, step: Step) -> None:
    text = run(ranks2, step)
    assert count(text, "all_reduce_") == 1
    assert copies(text) == 0


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


@row("S6", "dynamo_support_collective_op_with_async_op_False")
def test_dynamo_support_collective_op_with_async_op_False(ranks2: Any) -> None:
    text = run(ranks2, scatter_at_once)
    assert [count(text, "reduce_scatter_tensor"), count(text, "wait_tensor"), copies(text)] == [1, 1, 0]


@row("S6", "dynamo_graphbreaks_unsupported_async_op")
def test_dynamo_graphbreaks_unsupported_async_op(ranks2: Any) -> None:
    """It stays in the one graph, and what the user put before the wait stands before it."""
    text = run(ranks2, scatter_and_wait)
    start, hidden, wait = (text.index(name) for name in ("reduce_scatter_tensor", "aten.mm", "wait_tensor"))
    assert start < hidden < wait


def rank_and_size(x: Tensor, y: Tensor) -> tuple[Tensor, int]:
    group = dist.group.WORLD
    return x + (group.rank() + 1 % group.size()), group.size()


@row("S6", "dynamo_pg_var")
def test_dynamo_pg_var(ranks2: Any) -> None:
    """The size is a constant; the rank is an input, so both ranks have the same text."""
    assert count(run(ranks2, rank_and_size), "add") == 1


# ---- derivatives, shapes -----------------------------------------------------------------------------------------


def backward_through(x: Tensor, y: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    z = leaf * 2
    dist.all_reduce(z)
    return torch.autograd.grad(z.sum(), [leaf])[0]


def refused(step: Step) -> str:
    with pytest.raises(ws.CaptureError) as caught:
        ws.compile(step)(*tensors(0))
    return str(caught.value)


@row("S6", "backwards")
def test_backwards(ranks2: Any) -> None:
    (message, _) = ranks2.run(refused, backward_through)
    assert re.search(r"all_reduce, called at test_inductor_collectives\.py:\d+, has overwritten", message)
    assert "torch.distributed.nn.functional" in message


def differentiable(x: Tensor, y: Tensor) -> list[Tensor]:
    a, b = x.detach().requires_grad_(), y.detach().requires_grad_()
    whole = dist.nn.functional.all_reduce(a * b)
    parts = torch.stack(list(dist.nn.functional.all_gather(a)))
    out = dist.nn.functional.reduce_scatter(torch.empty_like(a), [a * (k + 1) for k in range(group_size())])
    loss = whole.square().sum() + (parts * b).sum() + (out**3).sum()
    loss = loss + (funcol.all_gather_tensor_autograd(a * 2, 0, dist.group.WORLD) ** 2).sum()
    return [loss, *torch.autograd.grad(loss, [a, b])]


@row("S6", "backwards")
def test_backwards_where_there_is_one(ranks2: Any) -> None:
    ranks2.run(compared, differentiable)


@row("S6", "meta")
def test_meta(pool2: Any) -> None:
    assert pool2.run(shapes)[0] == [(2, 3, 4), (4, 3, 4), (1, 3, 4), (2, 2, 3, 4)]


def shapes() -> list[tuple[int, ...]]:
    x, name = torch.rand(2, 3, 4, device="meta"), dist.group.WORLD.group_name
    found = [c10d.all_reduce(x, "sum", name), c10d.all_gather_into_tensor(x, 2, name)]
    found += [c10d.reduce_scatter_tensor(x, "sum", 2, name), torch.ops.wholestep.gather(x, 0, 2, name)]
    return [tuple(one.shape) for one in found]
