"""Handles that cross the border of a compiled step, waits, messages, ranks, derivatives and shapes."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

import wholestep as ws
from tests.conformance.collectives.compiled_steps import (
    CALLS,
    COLUMNS,
    ROWS,
    Step,
    c10d,
    compared,
    count,
    group_size,
    leaves,
    refused,
    run,
    tensors,
    text_of,
)

row = functools.partial(pytest.mark.row, "S6")
HERE = Path(__file__).name


def wait_and_add(under_way: Tensor, x: Tensor) -> Tensor:
    return c10d.wait_tensor(under_way) + (x @ x.t()).sum()


def wait_for_the_input(under_way: Tensor, x: Tensor) -> Tensor:
    c10d.wait_tensor(under_way)  # what it gives is the tensor itself, which may be read in its place
    return under_way + x


def started_eagerly(step: Step) -> str:
    compiled, name = ws.compile(step, fullgraph=True), dist.group.WORLD.group_name
    for call in range(CALLS):
        x, y = tensors(call)
        found = compiled(c10d.all_reduce(x, "sum", name), y)
        assert torch.equal(found, step(c10d.all_reduce(x, "sum", name), y))
    return text_of(compiled.program())


@row("eager_allreduce_inductor_wait")
@pytest.mark.parametrize("step", [wait_and_add, wait_for_the_input])
def test_a_collective_started_eagerly_is_awaited_in_the_step(ranks2: Any, step: Step) -> None:
    (text, _) = ranks2.run(started_eagerly, step)
    assert count(text, "wait_tensor") == 1


def reduce_only(x: Tensor, y: Tensor) -> Tensor:
    return c10d.all_reduce(torch.cat((x @ y.t(), y @ x.t())), "sum", dist.group.WORLD.group_name)


def gather_only(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    sent = x * 2
    return c10d.all_gather_into_tensor(sent, group_size(), dist.group.WORLD.group_name), y + 1


def awaited_eagerly(step: Step) -> str:
    compiled = ws.compile(step, fullgraph=True)
    for call in range(CALLS):
        x, y = tensors(call)
        found, wanted = leaves(compiled(x, y))[0], leaves(step(x, y))[0]
        assert torch.equal(c10d.wait_tensor(found), c10d.wait_tensor(wanted))
    return text_of(compiled.program())


@row("inductor_allreduce_eager_wait")
@pytest.mark.parametrize("step", [reduce_only, gather_only])
def test_a_collective_started_in_the_step_is_awaited_eagerly(ranks2: Any, step: Step) -> None:
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


@row("eager_allreduce_inductor_wait")
def test_a_handle_from_outside_is_refused(ranks2: Any) -> None:
    assert "started outside of it" in ranks2.run(waits_for_a_handle, [])[0]


def permuted(x: Tensor, y: Tensor) -> Tensor:
    # Each rank gives to the next one; the pairs are (place in the list, value).
    pairs = [(rank + 1) % group_size() for rank in range(group_size())]
    return funcol.permute_tensor((x * 2).reshape(-1), pairs, dist.group.WORLD).view(ROWS, COLUMNS) + y


@row("permute_tensor")
def test_permute_tensor_equals_eager_code(ranks2: Any) -> None:
    """Which rank sends to which is in the split sizes of this rank, so the texts differ; the plan is one."""
    ranks2.run(compared, permuted)


@row("permute_tensor")
def test_permute_tensor_equals_eager_code_on_four_ranks(ranks4: Any) -> None:
    ranks4.run(compared, permuted)


def scatter_and_wait(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    out = x.new_empty(ROWS // group_size(), COLUMNS)
    work = dist.reduce_scatter_tensor(out, x, async_op=True)
    hides_it = y @ y.t()
    work.wait()
    return out, hides_it


@row("dynamo_graphbreaks_unsupported_async_op")
def test_an_asynchronous_collective_stays_in_the_one_graph(ranks2: Any) -> None:
    """It stays in the one graph, and what the user put before the wait stands before it."""
    text = run(ranks2, scatter_and_wait)
    start, hidden, wait = (text.index(name) for name in ("reduce_scatter_tensor", "aten.mm", "wait_tensor"))
    assert start < hidden < wait


def rank_and_size(x: Tensor, y: Tensor) -> tuple[Tensor, int]:
    group = dist.group.WORLD
    return x + (group.rank() + 1 % group.size()), group.size()


@row("dynamo_pg_var")
def test_the_rank_is_an_input_and_the_size_a_constant(ranks2: Any) -> None:
    """The size is a constant; the rank is an input, so both ranks have the same text."""
    assert count(run(ranks2, rank_and_size), "add") == 1


def backward_through(x: Tensor, y: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    z = leaf * 2
    dist.all_reduce(z)
    return torch.autograd.grad(z.sum(), [leaf])[0]


@row("backwards")
def test_a_backward_through_an_overwritten_tensor_is_refused(ranks2: Any) -> None:
    (message, _) = ranks2.run(refused, backward_through)
    assert re.search(rf"all_reduce, called at {HERE}:\d+, has overwritten", message)
    assert "torch.distributed.nn.functional" in message


def differentiable(x: Tensor, y: Tensor) -> list[Tensor]:
    a, b = x.detach().requires_grad_(), y.detach().requires_grad_()
    whole = dist.nn.functional.all_reduce(a * b)
    parts = torch.stack(list(dist.nn.functional.all_gather(a)))
    out = dist.nn.functional.reduce_scatter(torch.empty_like(a), [a * (k + 1) for k in range(group_size())])
    loss = whole.square().sum() + (parts * b).sum() + (out**3).sum()
    loss = loss + (funcol.all_gather_tensor_autograd(a * 2, 0, dist.group.WORLD) ** 2).sum()
    return [loss, *torch.autograd.grad(loss, [a, b])]


@row("backwards")
def test_differentiable_collectives_equal_eager_code(ranks2: Any) -> None:
    ranks2.run(compared, differentiable)


@row("meta")
def test_collectives_of_meta_tensors_have_shapes(pool2: Any) -> None:
    assert pool2.run(shapes)[0] == [(2, 3, 4), (4, 3, 4), (1, 3, 4), (2, 2, 3, 4)]


def shapes() -> list[tuple[int, ...]]:
    x, name = torch.rand(2, 3, 4, device="meta"), dist.group.WORLD.group_name
    found = [c10d.all_reduce(x, "sum", name), c10d.all_gather_into_tensor(x, 2, name)]
    found += [c10d.reduce_scatter_tensor(x, "sum", 2, name), torch.ops.wholestep.gather(x, 0, 2, name)]
    return [tuple(one.shape) for one in found]
