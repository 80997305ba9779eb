"""What collectives of torch.distributed check and carry: dtypes, and every collective there is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from wholestep.runtime.distributed.world import init

row = pytest.mark.row
on_gpu = pytest.mark.gpu


def mixes_dtypes() -> dict[str, str]:
    """Call -> what was raised; every call has one tensor of half precision among others."""
    device = init().device
    one = torch.full((2, 2), 7.0, device=device)
    half = one.half()
    many = [torch.zeros(2, 2, device=device) for _ in range(2)]
    mixed = [many[0], many[1].half()]
    calls: dict[str, Callable[[], Any]] = {
        "all_gather, outputs": lambda: dist.all_gather(mixed, one),
        "all_gather, input": lambda: dist.all_gather(many, half),
        "all_gather_coalesced, outputs": lambda: dist.all_gather_coalesced([mixed], many),
        "all_gather_coalesced, inputs": lambda: dist.all_gather_coalesced([many], mixed),
        "all_reduce_coalesced": lambda: dist.all_reduce_coalesced(mixed),
        "reduce_scatter, inputs": lambda: dist.reduce_scatter(one, mixed),
        "reduce_scatter, output": lambda: dist.reduce_scatter(half, many),
        "all_to_all_single": lambda: dist.all_to_all_single(half, one),
        "all_to_all, outputs": lambda: dist.all_to_all(mixed, many),
        "all_to_all, inputs": lambda: dist.all_to_all(many, mixed),
        "scatter, inputs": lambda: dist.scatter(one, mixed),
        "scatter, output": lambda: dist.scatter(half, many),
        "gather, input": lambda: dist.gather(half, many),
        "gather, outputs": lambda: dist.gather(one, mixed),
    }
    return {name: raised(call) for name, call in calls.items()}


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@row("S9", "tensor_dtype_mismatch")
def test_mixed_dtypes_raise(ranks2: Any) -> None:
    for found in ranks2.run(mixes_dtypes):
        assert len(found) == 14
        for name, text in found.items():
            assert text.startswith("ValueError:"), name
            assert "tensors with different dtypes" in text, name


def gathers_complex() -> None:
    world = init()
    mine = torch.tensor([1.0 + world.rank, 0.5], device=world.device)
    wanted = torch.tensor([[1.0, 0.5], [2.0, 0.5]], device=world.device)
    for as_complex in (False, True):
        for complex_outputs in ((), (1,), (0, 1)):
            held = [torch.zeros(2, device=world.device) for _ in range(2)]
            into = [torch.view_as_complex(t) if number in complex_outputs else t for number, t in enumerate(held)]
            dist.all_gather(into, torch.view_as_complex(mine) if as_complex else mine)
            assert torch.equal(torch.stack(held), wanted), (as_complex, complex_outputs)


def broadcasts_bool() -> None:
    world = init()
    wanted = torch.tensor([True, False, False, True], device=world.device)
    tensor = wanted.clone() if world.rank == 0 else torch.zeros_like(wanted)
    dist.broadcast(tensor, src=0)
    assert tensor.dtype == torch.bool
    assert torch.equal(tensor, wanted)


def runs_every_collective(device: str) -> None:
    """On 1 x 3 matrices whose numbers say which rank r sent them to which rank t: 10 r + t."""
    world = init()
    where = world.device if device == "own" else torch.device(device)
    rank, ranks = world.rank, range(world.size)

    def sent(source: int, to: int = 0) -> Tensor:
        return torch.full((1, 3), 10.0 * source + to, device=where)

    def check(name: str, found: list[Tensor], wanted: list[Tensor]) -> None:
        assert all(map(torch.equal, found, wanted)), (name, found, wanted)

    total = sum(sent(r) for r in ranks)
    tensor = sent(rank)
    dist.reduce(tensor, dst=1)
    check("reduce", [tensor], [total] if rank == 1 else [tensor])
    tensor = sent(rank)
    dist.broadcast(tensor, src=1)
    check("broadcast", [tensor], [sent(1)])
    tensor = sent(rank)
    dist.all_reduce(tensor)
    check("all_reduce", [tensor], [total])
    into = [torch.zeros_like(tensor) for _ in ranks]
    dist.all_gather(into, sent(rank))
    check("all_gather", into, [sent(r) for r in ranks])
    into = [torch.zeros_like(tensor) for _ in ranks]
    dist.gather(sent(rank), into if rank == 0 else None, dst=0)
    check("gather", into, [sent(r) for r in ranks] if rank == 0 else into)
    tensor = torch.zeros_like(tensor)
    dist.scatter(tensor, [sent(1, t) for t in ranks] if rank == 1 else None, src=1)
    check("scatter", [tensor], [sent(1, rank)])
    dist.reduce_scatter(tensor, [sent(rank, t) for t in ranks])
    check("reduce_scatter", [tensor], [sum(sent(r, rank) for r in ranks)])
    into = [torch.zeros_like(tensor) for _ in ranks]
    if where.type == "cpu" and has_no_all_to_all_lists():
        with pytest.raises(RuntimeError, match="gloo does not support alltoall"):
            dist.all_to_all(into, [sent(rank, t) for t in ranks])
    else:
        dist.all_to_all(into, [sent(rank, t) for t in ranks])
        check("all_to_all", into, [sent(r, rank) for r in ranks])
    dist.barrier()


def has_no_all_to_all_lists() -> bool:
    """gloo learned it in torch 2.13."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13)


@row("S9", "collectives")
@on_gpu
def test_a_group_for_two_devices_carries_tensors_of_both(nccl2: Any) -> None:
    nccl2.run(runs_every_collective, "cpu")
    nccl2.run(runs_every_collective, "own")


def reduces_several() -> None:
    world = init()
    tensors = [torch.full(shape, world.rank + 1.0, device=world.device) for shape in ((10, 10), (3,))]
    dist.all_reduce_coalesced(tensors, dist.ReduceOp.SUM)
    for tensor in tensors:
        assert torch.equal(tensor, torch.full_like(tensor, 3.0))


def exchanges_one() -> None:
    world = init()
    mine = torch.arange(4.0, device=world.device).view(2, 2) + 10 * world.rank
    into = torch.zeros(2, 2, device=world.device)
    dist.all_to_all_single(into, mine)
    first = 2.0 * world.rank
    assert into.tolist() == [[first, first + 1], [first + 10, first + 11]]


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(gathers_complex, id="complex", marks=row("S9", "tensor_dtype_complex")),
        pytest.param(broadcasts_bool, id="bool", marks=row("S9", "bool_tensors")),
        pytest.param(partial(runs_every_collective, "own"), id="every collective", marks=row("S9", "collectives")),
        pytest.param(reduces_several, id="several at once", marks=row("S9", "allreduce_coalesced")),
        pytest.param(exchanges_one, id="all_to_all_single", marks=row("S9", "all_to_all_single")),
    ],
)
def test_collectives_carry_tensors_between_two_ranks(ranks2: Any, check: Callable[[], None]) -> None:
    ranks2.run(check)
