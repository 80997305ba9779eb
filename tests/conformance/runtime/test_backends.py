"""Backends by name, backends written in Python, and the default of each device."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness.store_group import BACKEND, StoreGroup, register
from wholestep.runtime.distributed.world import close_current, init

row = pytest.mark.row
on_gpu = pytest.mark.gpu


def made_up(store: dist.Store, rank: int, size: int, timeout: timedelta) -> StoreGroup:
    return StoreGroup(store, rank, size, timeout)


@pytest.fixture
def new_backend() -> str:
    """A name that no backend has; registered ones stay in the process."""
    return f"made{uuid.uuid4().hex[:8]}"


@row("S10", "get_backend_name")
def test_a_python_group_has_a_name() -> None:
    assert StoreGroup(dist.HashStore(), 0, 1).name() == BACKEND


@row("S10", "backend_class_attr")
def test_a_registered_backend_is_an_attribute(new_backend: str) -> None:
    dist.Backend.register_backend(new_backend, made_up, devices=["cpu"])
    assert getattr(dist.Backend, new_backend.upper()) == new_backend
    assert dist.Backend(new_backend.upper()) == new_backend
    assert dist.Backend._plugins[new_backend.upper()].creator_fn is made_up


@row("S10", "is_backend_available")
def test_a_registered_backend_is_available(new_backend: str) -> None:
    assert dist.is_backend_available("gloo") == dist.is_gloo_available()
    assert dist.is_backend_available("ucc") == dist.is_ucc_available()
    assert not dist.is_backend_available(new_backend)
    dist.Backend.register_backend(new_backend, made_up, devices=["cpu"])
    assert dist.is_backend_available(new_backend)


@row("S10", "backend_config")
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("gloo", "cpu:gloo,cuda:gloo"),
        ("nccl", "cuda:nccl"),
        ("mpi", "cpu:mpi,cuda:mpi"),
        ("ucc", "cpu:ucc,cuda:ucc"),
        ("NEW", "cpu:new,cuda:new"),
        ("new", "cpu:new,cuda:new"),
        ("cpu:new,cuda:new", "cpu:new,cuda:new"),
        ("cpu:new,cuda:nccl", "cpu:new,cuda:nccl"),
        ("cpu:gloo,cuda:new", "cpu:gloo,cuda:new"),
        ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl"),
    ],
)
def test_a_backend_string_names_a_backend_for_each_device(new_backend: str, text: str, wanted: str) -> None:
    dist.Backend.register_backend(new_backend, made_up, devices=["cpu", "cuda"])
    named = text.replace("new", new_backend).replace("NEW", new_backend.upper())
    assert str(dist.BackendConfig(dist.Backend(named))) == wanted.replace("new", new_backend)


@row("S10", "backend_config")
@pytest.mark.parametrize("text", ["cpu:gloo,cuda:nccl,", "cpu:gloo,cuda:nccl,cpu:gloo", "cpu:gloo,nccl", "cpu:a:b"])
def test_bad_backend_strings_raise(text: str) -> None:
    with pytest.raises(ValueError, match=r"Invalid device:backend pairing|Duplicate device type"):
        dist.BackendConfig(dist.Backend(text))


def of_python(backend: str, fn: Callable[[StoreGroup], None]) -> None:
    """Runs `fn` while the default group is one of Python's, and leaves the World of the pool behind as it was."""
    register()
    close_current()
    world = init(backend)
    try:
        assert isinstance(dist.group.WORLD, StoreGroup)
        assert (dist.get_rank(), dist.get_world_size()) == (world.rank, world.size)
        fn(dist.group.WORLD)
        world.barrier("done with Python")
    finally:
        world.close()
        init("gloo")


def gathers(group: StoreGroup) -> None:
    into = [torch.zeros(2, 2) for _ in range(group.size())]
    dist.all_gather(into, torch.full((2, 2), 1.0 + group.rank()))
    for rank, tensor in enumerate(into):
        assert torch.equal(tensor, torch.full((2, 2), 1.0 + rank))
    dist.barrier()
    assert dict(group.calls) == {"allgather": 1, "barrier": 1}


@row("S10", "init_process_group_with_multiple_backends")
def test_one_python_backend_serves_every_device(pool2: Any) -> None:
    pool2.run(of_python, f"cpu:{BACKEND},cuda:{BACKEND}", gathers)


def runs_every_collective_in_python(group: StoreGroup) -> None:
    rank, ranks = group.rank(), range(group.size())
    tensor = torch.full((3,), rank + 1.0)
    work = dist.all_reduce(tensor, async_op=True)
    assert work.wait()
    assert tensor.tolist() == [3.0] * 3
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    assert tensor.tolist() == [3.0] * 3
    tensor = torch.full((2,), float(rank))
    dist.broadcast(tensor, 1, async_op=True).wait()
    assert tensor.tolist() == [1.0, 1.0]
    tensor = torch.zeros(2)
    dist.reduce_scatter(tensor, [torch.full((2,), 10.0 * rank + to) for to in ranks])
    assert tensor.tolist() == [10.0 + 2 * rank] * 2
    dist.reduce_scatter_tensor(tensor, torch.arange(4.0))
    assert tensor.tolist() == [4.0 * rank, 4.0 * rank + 2]
    whole = torch.zeros(4)
    dist.all_gather_into_tensor(whole, torch.full((2,), float(rank)))
    assert whole.tolist() == [0, 0, 1, 1]
    dist.all_to_all_single(tensor, torch.arange(2.0) + 10 * rank)
    assert tensor.tolist() == [rank, 10.0 + rank]
    gathers_objects = [None, None]
    dist.all_gather_object(gathers_objects, {"rank": rank})
    assert gathers_objects == [{"rank": 0}, {"rank": 1}]


@row("S10", "python_collectives")
def test_a_python_group_carries_collectives(pool2: Any) -> None:
    pool2.run(of_python, BACKEND, runs_every_collective_in_python)


def sends_around(group: StoreGroup) -> None:
    rank, other = group.rank(), 1 - group.rank()
    dist.send(torch.full((2, 2), 5.0 + rank), other)
    tensor = torch.zeros(2, 2)
    dist.recv(tensor, other)
    assert torch.equal(tensor, torch.full((2, 2), 5.0 + other))
    with pytest.raises(ValueError, match=r"[Ii]nvalid destination rank"):
        dist.send(tensor, rank)
    dist.barrier()


@row("S10", "send_recv")
def test_a_python_group_sends_and_receives(pool2: Any) -> None:
    pool2.run(of_python, BACKEND, sends_around)


@contextmanager
def group_of_one(backend: str | None) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@row("S10", "init_process_group_optional_backend")
def test_each_device_has_a_default_backend() -> None:
    assert dist.get_default_backend_for_device("cpu") == "gloo"
    assert dist.get_default_backend_for_device(torch.device("cuda", 0)) == "nccl"
    with group_of_one(None):
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert "cpu:gloo" in str(dist.get_backend_config())


@row("S10", "init_process_group_optional_backend")
@on_gpu
def test_without_a_backend_a_gpu_gets_nccl() -> None:
    with group_of_one(None):
        tensor = torch.ones(2, device="cuda")
        dist.all_reduce(tensor)
        assert "cuda:nccl" in str(dist.get_backend_config())


@row("S10", "init_process_group_for_all_backends")
@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=on_gpu)])
def test_every_backend_makes_a_group(backend: str) -> None:
    with group_of_one(backend) as group:
        assert (group.rank(), group.size(), group.name()) == (0, 1, backend)
