"""What the calls of torch.distributed in a step become, seen from one of four ranks that talk to nobody."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.unit.capture.steps import program_of
from wholestep.cost.cost_model import CostModel
from wholestep.errors import CaptureError
from wholestep.ir.printer import plan_text, source
from wholestep.ir.program import InputKind, Program
from wholestep.passes.default_passes import passes_of
from wholestep.passes.pass_manager import run_passes
from wholestep.place.strategies import place

HERE = Path(__file__).name

RANK, SIZE = 1, 4
Groups = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[Groups]:
    """Rank 1 of four, with a mesh of two rows, an irregular group, and one that this rank is not in."""
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=SIZE)
    made: Groups = {
        "mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner")),
        "odd": dist.new_group([0, 1, 2]),
        "others": dist.new_group([2, 3]),
        "again": dist.new_group(list(range(SIZE))),
    }
    yield made
    dist.destroy_process_group()


def captured(step: Callable[..., Any], *args: Tensor) -> Program:
    return program_of(step, *(args or (torch.ones(SIZE, 3),)))


def scheduled(step: Callable[..., Any], *args: Tensor) -> Program:
    return run_passes(place(captured(step, *args), None, None), passes_of(cost=CostModel.default("cpu+gloo")))


def plan(step: Callable[..., Any]) -> list[str]:
    """The plan without its header."""
    return plan_text(scheduled(step)).splitlines()[2:]


def num_waits(step: Callable[..., Any]) -> int:
    return source(scheduled(step), comments=False).count("wait_tensor.default(")


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
def test_reductions_by_name(op: str) -> None:
    (start,) = plan(lambda x: dist.all_reduce(x, getattr(dist.ReduceOp, op)))
    assert start == f"#0 all_reduce float32[12] {op.lower()} axis=world size=4"


def test_what_a_form_writes_is_in_the_program() -> None:
    """A call on an argument ends in a WRITE of it; nothing in the captured program writes in place."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x + y

    program = captured(step, torch.ones(3), torch.ones(3))
    assert [(o.kind.value, o.target) for o in program.outputs] == [("user", None), ("write", 0)]


# ---- waits -------------------------------------------------------------------------------------------------------


def positions(text: str, *names: str) -> list[int]:
    return [text.index(name) for name in names]


def test_a_wait_stands_where_the_user_waits() -> None:
    def step(x: Tensor) -> Tensor:
        z = x + 1
        work = dist.all_reduce(z, async_op=True)
        hides_it = torch.tanh(x)
        work.wait()
        return z * hides_it

    found = positions(source(captured(step)), ".all_reduce.", ".tanh.", ".wait_tensor.", ".mul.")
    assert found == sorted(found)


@pytest.mark.parametrize("ask", ["is_completed", "is_success", "synchronize", "result", "get_future"])
def test_whatever_needs_the_result_waits(ask: str) -> None:
    def step(x: Tensor) -> Tensor:
        z = x + 1
        getattr(dist.all_reduce(z, async_op=True), ask)()
        return torch.tanh(z)

    found = positions(source(captured(step)), ".wait_tensor.", ".tanh.")
    assert found == sorted(found)


def test_what_nobody_awaits_is_awaited_at_the_end() -> None:
    def step(x: Tensor) -> Tensor:
        dist.all_reduce(x, async_op=True)
        return torch.tanh(torch.ones(3))

    text = source(captured(step))
    assert positions(text, ".tanh.", ".wait_tensor.") == sorted(positions(text, ".tanh.", ".wait_tensor."))


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


# ---- coalescing --------------------------------------------------------------------------------------------------


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

    text = source(captured(step))
    assert positions(text, "all_reduce_coalesced", ".tanh.", "wait_tensor") == sorted(
        positions(text, "all_reduce_coalesced", ".tanh.", "wait_tensor")
    )


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


# ---- messages, barriers ------------------------------------------------------------------------------------------


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


# ---- groups ------------------------------------------------------------------------------------------------------


def over(group: Any) -> Callable[[Tensor], None]:
    return lambda x: dist.all_reduce(x, group=group)


def test_groups_have_names_that_all_ranks_share(groups: Groups) -> None:
    mesh: DeviceMesh = groups["mesh"]
    assert plan(over(mesh.get_group("inner")))[0].endswith("axis=stride 1 size=2")
    assert plan(over(mesh.get_group("outer")))[0].endswith("axis=stride 2 size=2")
    assert plan(over(groups["again"]))[0].endswith("axis=world #2 size=4")


def test_a_group_that_divides_nothing_names_its_ranks(groups: Groups) -> None:
    assert plan(over(groups["odd"])) == ["[0,1,2] all_reduce float32[12] sum axis=ranks 0+1+2 size=3"]


def test_by_rank_every_smaller_group_names_its_ranks(groups: Groups) -> None:
    program = scheduled(over(groups["mesh"].get_group("outer")))
    lines = plan_text(program, by_rank=True).splitlines()[2:]
    assert lines == ["[1,3] all_reduce float32[12] sum axis=stride 2 size=2"]


def test_outside_of_a_group_nothing_happens(groups: Groups) -> None:
    with pytest.warns(UserWarning, match="Running all_reduce on global rank 1"):
        assert plan(over(groups["others"])) == []


def test_axes_of_the_step_stand_behind_the_strategys(groups: Groups) -> None:
    placed = place(captured(over(groups["odd"])), None, None)
    assert [axis.size for axis in placed.mesh] == [1, 3]


# ---- ranks -------------------------------------------------------------------------------------------------------


def test_a_rank_in_the_arithmetic_is_an_input() -> None:
    program = captured(lambda x: x * dist.get_rank() + x[dist.get_rank()] + torch.tensor([dist.get_rank(), 0, 1]))
    (record,) = (one for one in program.inputs if one.kind is InputKind.RANK)
    assert record.name == "rank.world"
    assert "1, 0" not in source(program, comments=False).replace("select.int(arg0_1, 0, arg", "")


def test_every_way_to_ask_for_a_rank(groups: Groups) -> None:
    mesh = groups["mesh"]
    seen: list[Any] = []

    def step(x: Tensor) -> Tensor:
        seen[:] = [
            dist.get_rank(), dist.get_rank(groups["odd"]), dist.group.WORLD.rank(), mesh.get_rank(),
            mesh.get_local_rank("inner"), *mesh.get_coordinate(), dist.get_rank(groups["others"]),
        ]  # fmt: skip
        total = x
        for number in seen:
            total = total + number
        seen[:] = [(type(number).__name__, int(number)) for number in seen]
        return total

    program = captured(step)
    assert seen == [*[("SymInt", 1)] * 5, ("SymInt", 0), ("SymInt", 1), ("int", -1)]
    names = {one.name for one in program.inputs if one.kind is InputKind.RANK}
    assert names == {"rank.world", "rank.ranks 0+1+2", "rank.stride 1", "rank.stride 2"}


def test_python_sees_the_number() -> None:
    """Branches, indices of lists, keys and texts have the value, and the rest of the step still has the symbol."""

    def step(x: Tensor) -> dict[str, Tensor]:
        rank = dist.get_rank()
        found = [rank == 1, rank > 1, [5, 6][rank], {1: "one"}[rank], *range(rank), f"{rank}", str(rank + 1)]
        assert [bool(one) if isinstance(one, torch.SymBool) else one for one in found] == [
            True, False, 6, "one", 0, "1", "2",
        ]  # fmt: skip
        return {f"of {rank}": x * rank}

    program = captured(step)
    assert [one.name for one in program.inputs if one.kind is InputKind.RANK] == ["rank.world"]


def test_other_threads_and_torch_itself_get_plain_numbers() -> None:
    def step(x: Tensor) -> Tensor:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(dist.get_rank()))
        thread.start()
        thread.join()
        assert type(found[0]) is int
        return x + 1

    captured(step)


def test_everything_is_back_after_a_capture() -> None:
    before = [dist.get_rank.__code__, dict(vars(dist.ProcessGroup)), torch.SymInt.__index__, torch.Tensor.__getitem__]
    captured(lambda x: dist.all_reduce(x))
    with pytest.raises(CaptureError):
        captured(lambda x: dist.monitored_barrier())
    after = [dist.get_rank.__code__, dict(vars(dist.ProcessGroup)), torch.SymInt.__index__, torch.Tensor.__getitem__]
    assert before == after
    assert dist.get_rank() == RANK


# ---- what passes may do with them --------------------------------------------------------------------------------


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


# ---- refusals ----------------------------------------------------------------------------------------------------


def from_any(x: Tensor) -> None:
    dist.recv(x)


def new_group(x: Tensor) -> None:
    dist.new_group([0, 1])


def premultiplied(x: Tensor) -> None:
    dist.all_reduce(x, dist._make_nccl_premul_sum(2.0))


def uneven(x: Tensor) -> None:
    dist.all_gather([torch.empty(2), torch.empty(3), torch.empty(3), torch.empty(3)], torch.ones(3))


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "all_gather_object": (lambda x: dist.all_gather_object([None] * SIZE, {}), "all_gather_object sends Python"),
    "broadcast_object_list": (lambda x: dist.broadcast_object_list([1], 0), "broadcast_object_list sends Python"),
    "scatter_object_list": (lambda x: dist.scatter_object_list([None], None, 0), "scatter_object_list sends Python"),
    "gather_object": (lambda x: dist.gather_object(1, None, 0), "gather_object sends Python objects"),
    "send_object_list": (lambda x: dist.send_object_list([1], 2), "send_object_list sends Python objects"),
    "recv_object_list": (lambda x: dist.recv_object_list([1], 2), "recv_object_list sends Python objects"),
    "monitored_barrier": (lambda x: dist.monitored_barrier(), "monitored_barrier talks to the ranks one by one"),
    "recv": (from_any, "Name the source"),
    "new_group": (new_group, "Make it before the first step"),
    "premul_sum": (premultiplied, "PREMUL_SUM has no functional form"),
    "uneven": (uneven, "A graph has one shape for all of them"),
    "tensor": (lambda x: dist.group.WORLD.allreduce(x), r"Give \[tensor\]"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_by_name_with_the_users_line(what: str) -> None:
    step, reason = REFUSED[what]
    with pytest.raises(CaptureError, match=reason) as caught:
        captured(step)
    assert re.search(rf"captured at \S*{HERE}:\d+", str(caught.value))


def test_a_backward_through_what_was_overwritten_is_refused() -> None:
    def step(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        z = leaf * 2
        before = z.sum()
        dist.all_reduce(z)
        if dist.get_rank() == RANK:
            return torch.autograd.grad(before, [leaf])[0]  # goes around the collective: fine
        return z

    captured(step)
    with pytest.raises(CaptureError, match=rf"all_reduce, called at {HERE}:\d+, has overwritten"):
        captured(lambda x: _through(x))


def _through(x: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    z = leaf * 2
    dist.all_reduce(z)
    return torch.autograd.grad(z.sum(), [leaf])[0]


def test_a_parameter_may_be_overwritten() -> None:
    """As eager code does it to make parameters equal; no backward is asked for."""
    leaf = torch.ones(3, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        dist.broadcast(leaf, 0)
        return x + 1

    assert plan(step)[0] == "#0 broadcast float32[3] 0 axis=world size=4"


@pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < (2, 13), reason="older tracers are told that it is not 1"
)
def test_a_branch_on_a_size_that_is_data_is_refused() -> None:
    def step(x: Tensor, sizes: Tensor) -> Tensor:
        given = sizes.tolist()
        out = x.new_empty(sum(given), 2)
        dist.all_to_all_single(out, x, given, [2] * len(given))
        return out * 2 if out.shape[0] == 1 else out

    with pytest.raises(CaptureError, match=HERE):
        captured(step, torch.randn(2 * dist.get_world_size(), 2), torch.ones(dist.get_world_size(), dtype=torch.int64))
