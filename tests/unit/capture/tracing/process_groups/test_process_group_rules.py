"""What the calls of torch.distributed in a step become: starts, waits, coalesced calls, messages."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

from tests.unit.capture.tracing.process_groups.programs import SIZE, captured, num_waits, plan, scheduled
from wholestep.ir.printer import source


def parts(x: Tensor) -> list[Tensor]:
    return [torch.empty_like(x) for _ in range(SIZE)]


def all_gather(x: Tensor) -> Any:
    out = parts(x)
    dist.all_gather(out, x)
    return out


def gather(x: Tensor) -> None:
    dist.gather(x, parts(x) if dist.get_rank() == 2 else None, dst=2)


def scatter(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    dist.scatter(out, parts(x) if dist.get_rank() == 0 else None, src=0)
    return out


def reduce_scatter(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    dist.reduce_scatter(out, [x] * SIZE)
    return out


def all_to_all(x: Tensor) -> Any:
    out = parts(x)
    dist.all_to_all(out, [x * k for k in range(SIZE)])
    return out


def all_to_all_single(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x)
    return out


def into_tensor(x: Tensor) -> Tensor:
    out = x.new_empty(SIZE * SIZE, 3)
    dist.all_gather_into_tensor(out, x)
    return out


FORMS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "all_reduce": (lambda x: dist.all_reduce(x), "#0 all_reduce float32[12] sum"),
    "broadcast": (lambda x: dist.broadcast(x, 3), "#0 broadcast float32[12] 3"),
    "reduce": (lambda x: dist.reduce(x, 2, dist.ReduceOp.MAX), "#0 reduce float32[12] max 2"),
    "all_gather": (all_gather, "#0 all_gather_into_tensor float32[12] 4"),
    "all_gather_into_tensor": (into_tensor, "#0 all_gather_into_tensor float32[12] 4"),
    "gather": (gather, "#0 gather float32[12] 2 4"),
    "scatter": (scatter, "#0 scatter float32[12] 0"),
    "reduce_scatter": (reduce_scatter, "#0 reduce_scatter float32[12]+float32[12]+float32[12]+float32[12] sum"),
    "all_to_all": (all_to_all, "#0 all_to_all_single float32 rows of []"),
    "all_to_all_single": (all_to_all_single, "#0 all_to_all_single float32 rows of [3]"),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_one_start_and_one_wait(form: str) -> None:
    step, start = FORMS[form]
    assert plan(step) == [f"{start} axis=world size=4"]
    assert num_waits(step) == 1


@pytest.mark.parametrize("op", ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"])
def test_a_reduction_is_named_in_the_plan(op: str) -> None:
    (start,) = plan(lambda x: dist.all_reduce(x, getattr(dist.ReduceOp, op)))
    assert start == f"#0 all_reduce float32[12] {op.lower()} axis=world size=4"


def test_what_a_form_writes_is_in_the_program() -> None:
    """A call on an argument ends in a WRITE of it; nothing in the captured program writes in place."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x + y

    program = captured(step, torch.ones(3), torch.ones(3))
    assert [(o.kind.value, o.target) for o in program.outputs] == [("user", None), ("write", 0)]


def assert_in_order(text: str, *names: str) -> None:
    positions = [text.index(name) for name in names]
    assert positions == sorted(positions)


def test_a_wait_stands_where_the_user_waits() -> None:
    def step(x: Tensor) -> Tensor:
        z = x + 1
        work = dist.all_reduce(z, async_op=True)
        hides_it = torch.tanh(x)
        work.wait()
        return z * hides_it

    assert_in_order(source(captured(step)), ".all_reduce.", ".tanh.", ".wait_tensor.", ".mul.")


@pytest.mark.parametrize("ask", ["is_completed", "is_success", "synchronize", "result", "get_future"])
def test_whatever_needs_the_result_waits(ask: str) -> None:
    def step(x: Tensor) -> Tensor:
        z = x + 1
        getattr(dist.all_reduce(z, async_op=True), ask)()
        return torch.tanh(z)

    assert_in_order(source(captured(step)), ".wait_tensor.", ".tanh.")


def test_what_nobody_awaits_is_awaited_at_the_end() -> None:
    def step(x: Tensor) -> Tensor:
        dist.all_reduce(x, async_op=True)
        return torch.tanh(torch.ones(3))

    assert_in_order(source(captured(step)), ".tanh.", ".wait_tensor.")


def test_waiting_twice_is_waiting_once() -> None:
    def step(x: Tensor) -> None:
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        work.wait()

    assert num_waits(step) == 1


def test_a_future_gives_the_tensors() -> None:
    def step(x: Tensor) -> Tensor:
        future = dist.all_reduce(z := x * 2, async_op=True).get_future()
        assert z is future.value()[0]
        return future.then(lambda done: done.value()[0] + 1).wait()

    assert ".add." in source(captured(step))


def coalesced_reduce(x: Tensor) -> Any:
    a, b = x + 1, x + 2
    with _coalescing_manager():
        dist.all_reduce(a)
        dist.all_reduce(b)
    return a, b


def coalesced_gather(x: Tensor) -> Any:
    a, b = x.new_empty(SIZE * SIZE, 3), x.new_empty(SIZE * SIZE, 3)
    with _coalescing_manager():
        dist.all_gather_into_tensor(a, x)
        dist.all_gather_into_tensor(b, x + 1)
    return a, b


def coalesced_scatter(x: Tensor) -> Any:
    a, b = x.new_empty(1, 3), x.new_empty(1, 3)
    with _coalescing_manager():
        dist.reduce_scatter_tensor(a, x)
        dist.reduce_scatter_tensor(b, x + 1)
    return a, b


@pytest.mark.parametrize("step", [coalesced_reduce, coalesced_gather, coalesced_scatter])
def test_the_coalescing_manager_gives_one_collective_and_a_wait_for_each_result(step: Any) -> None:
    (start,) = plan(step)
    assert "_coalesced float32[12]+float32[12]" in start
    assert num_waits(step) == 2


def test_coalesced_reductions_run_in_place() -> None:
    text = source(scheduled(coalesced_reduce), comments=False)
    assert "all_reduce_coalesced_.default([" in text
    assert not re.search(r"aten\.(clone|copy)", text)


def test_an_asynchronous_manager_is_awaited_where_the_user_waits() -> None:
    def step(x: Tensor) -> Any:
        a, b = x + 1, x + 2
        with _coalescing_manager(async_ops=True) as manager:
            dist.all_reduce(a)
            dist.all_reduce(b)
        hides_it = torch.tanh(x)
        manager.wait()
        return a, b, hides_it

    assert_in_order(source(captured(step)), "all_reduce_coalesced", ".tanh.", "wait_tensor")


def test_old_style_coalescing_shares_one_handle() -> None:
    """With a device the manager brackets single calls; the backend of the group does not see the bracket."""

    def step(x: Tensor) -> Any:
        a, b = x + 1, x + 2
        with _coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
            dist.broadcast(a, 0, async_op=True)
            dist.isend(b, 2)
        manager.wait()
        return a, b

    assert plan(step) == ["#0 broadcast float32[12] 0 axis=world size=4", "[1>2 world tag 0] float32[12]"]


def ring(x: Tensor) -> Tensor:
    rank, received = dist.get_rank(), torch.empty_like(x)
    calls = [
        dist.P2POp(dist.isend, x * 2, (rank + 1) % SIZE),
        dist.P2POp(dist.irecv, received, (rank - 1) % SIZE, tag=5),
    ]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return received


def test_messages_name_both_ends() -> None:
    assert plan(ring) == ["[1>2 world tag 0] float32[12]", "[0>1 world tag 5] float32[12]"]


def test_the_peer_of_a_message_is_a_number_of_the_graph() -> None:
    text = source(captured(ring), comments=False)
    assert "rank.world" in source(captured(ring))
    assert re.search(r"exchange\.default\(\[\w+\], \[True\], \[mod\]", text)


def test_a_message_that_nobody_reads_is_sent() -> None:
    text = source(scheduled(lambda x: dist.send(x, 3)), comments=False)
    assert [text.count("exchange.default"), text.count("wait_tensor.default")] == [1, 1]


def test_a_barrier_stays_in_its_place() -> None:
    def step(x: Tensor) -> Tensor:
        z = x + 1
        dist.all_reduce(z)
        dist.barrier()
        dist.all_reduce(z)
        return z

    assert [line.split()[1] for line in plan(step) if line.startswith("#")] == ["all_reduce", "barrier", "all_reduce"]


def test_a_collective_that_is_read_on_other_ranks_only_is_not_dropped() -> None:
    def step(x: Tensor) -> Any:
        z = x * 2
        dist.all_reduce(z)
        return z if dist.get_rank() == 0 else None

    assert [line.split()[1] for line in plan(step)] == ["all_reduce"]


def test_equal_reductions_are_done_once_and_equal_broadcasts_twice() -> None:
    def reductions(x: Tensor) -> Any:
        name = dist.group.WORLD.group_name
        started = [torch.ops._c10d_functional.all_reduce(x, "sum", name) for _ in range(2)]
        return [torch.ops._c10d_functional.wait_tensor(one) for one in started]

    def broadcasts(x: Tensor) -> Any:
        name = dist.group.WORLD.group_name
        started = [torch.ops._c10d_functional.broadcast(x, 0, name) for _ in range(2)]
        return [torch.ops._c10d_functional.wait_tensor(one) for one in started]

    assert (len(plan(reductions)), num_waits(reductions)) == (1, 1)
    assert (len(plan(broadcasts)), num_waits(broadcasts)) == (2, 2)
