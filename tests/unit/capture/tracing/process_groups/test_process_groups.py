"""Groups and ranks in a step, and the calls that have no functional form."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tests.harness.second_thread import second_thread
from tests.unit.capture.tracing.process_groups.programs import RANK, SIZE, Groups, captured, plan, scheduled
from wholestep.errors import CaptureError
from wholestep.ir.printer import plan_text, source
from wholestep.ir.program import InputKind
from wholestep.place.strategies import place

HERE = Path(__file__).name


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


def test_a_collective_of_a_group_of_others_does_nothing(groups: Groups) -> None:
    with pytest.warns(UserWarning, match="Running all_reduce on global rank 1"):
        assert plan(over(groups["others"])) == []


def test_axes_of_the_step_come_after_those_of_the_strategy(groups: Groups) -> None:
    placed = place(captured(over(groups["odd"])), None, ())
    assert [axis.size for axis in placed.mesh] == [1, 3]


def test_a_rank_in_the_arithmetic_is_an_input() -> None:
    program = captured(lambda x: x * dist.get_rank() + x[dist.get_rank()] + torch.tensor([dist.get_rank(), 0, 1]))
    (record,) = (one for one in program.inputs if one.kind is InputKind.RANK)
    assert record.name == "rank.world"
    assert "1, 0" not in source(program, comments=False).replace("select.int(arg0_1, 0, arg", "")


def test_tensors_are_no_sequences_behind_a_capture_with_ranks() -> None:
    captured(lambda x: x + x[dist.get_rank()])
    assert torch.tensor([torch.zeros(()), torch.ones(())]).tolist() == [0.0, 1.0]


def test_every_way_to_ask_for_a_rank_gives_an_input(groups: Groups) -> None:
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
        seen[:] = [(isinstance(number, torch.SymInt), int(number)) for number in seen]
        return total

    program = captured(step)
    assert seen == [*[(True, 1)] * 5, (True, 0), (True, 1), (False, -1)]
    names = {one.name for one in program.inputs if one.kind is InputKind.RANK}
    assert names == {"rank.world", "rank.ranks 0+1+2", "rank.stride 1", "rank.stride 2"}


def test_python_sees_the_number_of_a_rank() -> None:
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
    found: list[Any] = []
    with second_thread(lambda: found.append(dist.get_rank())) as let:

        def step(x: Tensor) -> Tensor:
            let()
            return x + 1

        captured(step)
    assert type(found[0]) is int


def test_everything_is_back_after_a_capture() -> None:
    before = [dist.get_rank.__code__, dict(vars(dist.ProcessGroup)), torch.SymInt.__index__, torch.Tensor.__getitem__]
    captured(lambda x: dist.all_reduce(x))
    with pytest.raises(CaptureError):
        captured(lambda x: dist.monitored_barrier())
    after = [dist.get_rank.__code__, dict(vars(dist.ProcessGroup)), torch.SymInt.__index__, torch.Tensor.__getitem__]
    assert before == after
    assert dist.get_rank() == RANK


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
def test_a_call_without_a_functional_form_is_refused_at_its_line(what: str) -> None:
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
