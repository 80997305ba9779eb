"""What torch.distributed promises and wholestep builds on: stores, groups, dtypes, backends, reduce operations.

A version of torch that breaks one of these promises is seen here, and not in a training that hangs.
"""

from __future__ import annotations

import copy
import pickle
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from tests.harness import shared_gpu
from tests.harness.store_group import BACKEND, StoreGroup, register
from wholestep.runtime.distributed.world import close_current, init

row = pytest.mark.row
on_gpu = pytest.mark.gpu

# ---- S8: stores --------------------------------------------------------------------------------------------------

PATIENCE_S = 0.5
NEEDED, CAME = 4, 3


def stores(kind: str, folder: Path, count: int) -> list[dist.Store]:
    """One store as `count` ranks see it, each through a connection of its own where it has connections."""
    if kind == "hash":
        return [dist.HashStore()] * count
    if kind == "file":
        return [dist.FileStore(str(folder / "store"), count) for _ in range(count)]
    first = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return [first, *(dist.TCPStore("127.0.0.1", first.port, is_master=False) for _ in range(count - 1))]


@row("S8", "store_timeout")
@pytest.mark.parametrize("kind", ["file", "tcp", "hash"])
def test_a_read_of_a_missing_key_gives_up_in_time(kind: str, tmp_path: Path) -> None:
    (store,) = stores(kind, tmp_path, 1)
    store.set_timeout(timedelta(seconds=PATIENCE_S))
    store.set("there", "value")
    assert store.get("there") == b"value"
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?i)timeout"):
        store.get("not there")
    assert 0.9 * PATIENCE_S < time.monotonic() - started < 20  # torch's own would be five minutes


@row("S8", "store_timeout")
@pytest.mark.parametrize("method", ["file", "tcp"])
def test_the_store_of_the_default_group_takes_the_timeout_of_the_group(method: str, tmp_path: Path) -> None:
    address = f"file://{tmp_path}/rendezvous" if method == "file" else "tcp://127.0.0.1:0"
    dist.init_process_group("gloo", init_method=address, world_size=1, rank=0, timeout=timedelta(seconds=1))
    try:
        started = time.monotonic()
        with pytest.raises(RuntimeError, match=r"(?i)timeout"):
            c10d._get_default_store().get("not there")
        assert 0.9 < time.monotonic() - started < 20
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def waited_in_vain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Exception | None]]:
    """Kind of store -> what each rank met in a barrier to which one rank does not come.

    All at once: the barrier of torch looks at its timeout every ten seconds and not more often.
    """

    def wait(store: dist.Store, rank: int) -> Exception | None:
        try:
            c10d._store_based_barrier(rank, store, "somebody_is_missing", NEEDED, timedelta(seconds=PATIENCE_S))
        except Exception as error:
            return error
        return None

    with ThreadPoolExecutor(3 * CAME) as threads:
        waits = {
            kind: [
                threads.submit(wait, store, rank)
                for rank, store in enumerate(stores(kind, tmp_path_factory.mktemp(kind), CAME))
            ]
            for kind in ("file", "tcp", "hash")
        }
        return {kind: [future.result() for future in futures] for kind, futures in waits.items()}


@row("S8", "store_based_barrier")
@pytest.mark.parametrize("kind", ["file", "tcp", "hash"])
def test_a_store_barrier_raises_on_every_rank_that_waits(
    kind: str, waited_in_vain: dict[str, list[Exception | None]]
) -> None:
    errors = waited_in_vain[kind]
    assert [type(error) for error in errors] == [dist.DistStoreError] * CAME
    assert isinstance(errors[0], dist.DistError)
    for rank, error in enumerate(errors):
        assert f"rank {rank}" in str(error)
        assert f"num_workers_joined={CAME}" in str(error)


@row("S8", "store_based_barrier")
@pytest.mark.parametrize("kind", ["file", "tcp", "hash"])
def test_a_store_barrier_ends_when_all_have_come(kind: str, tmp_path: Path) -> None:
    def wait(rank: int, store: dist.Store) -> float:
        started = time.monotonic()
        c10d._store_based_barrier(rank, store, "all", CAME, timedelta(seconds=30))
        return time.monotonic() - started

    with ThreadPoolExecutor(CAME) as threads:
        assert max(threads.map(wait, range(CAME), stores(kind, tmp_path, CAME))) < 15


# ---- S9: groups --------------------------------------------------------------------------------------------------


def sequence_number(group: dist.ProcessGroup) -> int:
    number: int = group._get_sequence_number_for_group()
    return number


def shown(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """The value of every rank of a group, which should not be the one whose numbers are looked at."""
    found = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def first_numbers(of: str) -> tuple[int, list[Any]]:
    init()
    group = dist.group.WORLD if of == "default" else dist.new_group([0, 1])
    return sequence_number(group), shown(sequence_number(group), dist.new_group([0, 1], backend="gloo"))


@row("S9", "sequence_num_set_default_pg")
def test_all_ranks_have_one_number_in_the_default_group(ranks2: Any) -> None:
    for _, numbers in ranks2.run(first_numbers, "default"):
        assert len(set(numbers)) == 1


@row("S9", "sequence_num_set_new_group")
def test_all_ranks_have_one_number_in_a_new_group(ranks2: Any) -> None:
    for mine, numbers in ranks2.run(first_numbers, "new"):
        assert numbers == [mine, mine]


def count_collectives(of: str) -> None:
    """The numbers go up together; then all but two ranks run ahead by one, which the numbers show."""
    world = init()
    ranks = list(range(world.size)) if of == "default" else [0, 1, 2]
    group = dist.group.WORLD if of == "default" else dist.new_group(ranks)
    control = dist.new_group(ranks, backend="gloo")
    if world.rank not in ranks:
        return
    tensor = torch.ones(1, device=world.device)
    dist.all_reduce(tensor, group=group)
    start = sequence_number(group)
    for done in range(1, 6):
        dist.all_reduce(tensor, group=group)
        assert shown(sequence_number(group), control) == [start + done] * len(ranks)
    lags = world.rank in (0, 2)
    ahead = None if lags else dist.all_reduce(tensor, group=group, async_op=True)
    numbers = shown(sequence_number(group), control)
    assert numbers == [start + 5 + (rank not in (0, 2)) for rank in ranks]
    (dist.all_reduce(tensor, group=group, async_op=True) if lags else ahead).wait()
    assert shown(sequence_number(group), control) == [start + 6] * len(ranks)


@row("S9", "sequence_num_incremented_default_group")
def test_numbers_count_the_collectives_of_the_default_group(ranks4: Any) -> None:
    ranks4.run(count_collectives, "default")


@row("S9", "sequence_num_incremented_subgroup")
def test_numbers_count_the_collectives_of_a_subgroup(ranks4: Any) -> None:
    ranks4.run(count_collectives, "sub")


def warned(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in caught if issubclass(one.category, UserWarning)]


def calls_a_group_of_others() -> dict[str, list[str]]:
    world = init()
    group = dist.new_group([0])
    x = torch.ones(2, 2, device=world.device)
    calls: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: dist.all_gather([torch.zeros_like(x)], x, group=group),
        "all_reduce": lambda: dist.all_reduce(x, group=group),
        "barrier": lambda: dist.barrier(group=group),
        "broadcast": lambda: dist.broadcast(x, src=0, group=group),
    }
    found = {name: warned(call) for name, call in calls.items()}
    assert torch.equal(x, torch.ones_like(x))
    return found


@row("S9", "warn_not_in_group")
def test_a_collective_on_a_group_of_others_warns(ranks2: Any) -> None:
    inside, outside = ranks2.run(calls_a_group_of_others)
    for name, texts in outside.items():
        assert [text for text in texts if name in text and "does not belong to" in text], name
        assert not [text for text in inside[name] if "does not belong to" in text]


def looks_up_ranks() -> None:
    init()
    group = dist.new_group([1])
    stranger = StoreGroup(dist.HashStore(), 0, 2)
    assert dist.get_group_rank(group, 1) == 0
    assert dist.get_global_rank(group, 0) == 1
    assert dist.get_process_group_ranks(group) == [1]
    with pytest.raises(ValueError, match="not part of group"):
        dist.get_group_rank(group, 0)
    with pytest.raises(ValueError, match="not part of group"):
        dist.get_global_rank(group, 1)
    for look_up in (dist.get_group_rank, dist.get_global_rank):
        with pytest.raises(ValueError, match="not registered"):
            look_up(stranger, 0)
    for rank in range(2):
        assert dist.get_group_rank(dist.group.WORLD, rank) == rank == dist.get_global_rank(dist.group.WORLD, rank)


def looks_up_ranks_where_it_may() -> None:
    # Who is not in a group has no group to ask about.
    if init().rank == 1:
        looks_up_ranks()
    else:
        assert dist.new_group([1]) == dist.GroupMember.NON_GROUP_MEMBER


@row("S9", "rank_membership")
def test_ranks_in_groups_and_in_the_world(ranks2: Any) -> None:
    ranks2.run(looks_up_ranks_where_it_may)


def makes_groups_with_its_partner() -> None:
    """Each rank with the one two further on: [0, 2] and [1, 3]; nobody else takes part."""
    rank = init().rank
    members = [rank, (rank + 2) % 4]
    others = sorted(set(range(4)) - set(members))
    assert dist.new_group(others, use_local_synchronization=True) is None
    group = dist.new_group(members, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    assert dist.get_process_group_ranks(group) == sorted(members)
    assert dist.get_group_rank(group, rank) == sorted(members).index(rank)


@row("S9", "new_group_local_sync")
def test_groups_that_only_their_members_make(ranks4: Any) -> None:
    ranks4.renew()  # torch names such a group after its members and the number of groups that a member has
    ranks4.run(makes_groups_with_its_partner)


def gathers_in_halves(count: int) -> None:
    world = init()
    half = world.rank // 2
    members = [2 * half, 2 * half + 1]
    groups = [dist.new_group(members, use_local_synchronization=True) for _ in range(count)]
    assert len({group.group_name for group in groups}) == count
    for number, group in enumerate(groups):
        mine = torch.tensor([number, half, world.rank], device=world.device)
        into = [torch.full_like(mine, -1) for _ in members]
        dist.all_gather(into, mine, group=group)
        assert [one.tolist() for one in into] == [[number, half, member] for member in members]


@row("S9", "new_group_local_sync_sanity_check")
def test_such_groups_carry_collectives(ranks4: Any) -> None:
    ranks4.renew()
    ranks4.run(gathers_in_halves, 1)


@row("S9", "new_group_local_sync_duplicate_pg")
def test_two_such_groups_have_the_same_members(ranks4: Any) -> None:
    ranks4.renew()
    ranks4.run(gathers_in_halves, 2)


# ---- S9: what collectives check and carry ------------------------------------------------------------------------


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


@row("S9", "tensor_dtype_complex")
def test_complex_goes_with_real_of_the_same_size(ranks2: Any) -> None:
    ranks2.run(gathers_complex)


def broadcasts_bool() -> None:
    world = init()
    wanted = torch.tensor([True, False, False, True], device=world.device)
    tensor = wanted.clone() if world.rank == 0 else torch.zeros_like(wanted)
    dist.broadcast(tensor, src=0)
    assert tensor.dtype == torch.bool
    assert torch.equal(tensor, wanted)


@row("S9", "bool_tensors")
def test_bool_is_broadcast(ranks2: Any) -> None:
    ranks2.run(broadcasts_bool)


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
def test_every_collective_carries_tensors(ranks2: Any) -> None:
    ranks2.run(runs_every_collective, "own")


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


@row("S9", "allreduce_coalesced")
def test_all_reduce_of_several_tensors(ranks2: Any) -> None:
    ranks2.run(reduces_several)


def exchanges_one() -> None:
    world = init()
    mine = torch.arange(4.0, device=world.device).view(2, 2) + 10 * world.rank
    into = torch.zeros(2, 2, device=world.device)
    dist.all_to_all_single(into, mine)
    first = 2.0 * world.rank
    assert into.tolist() == [[first, first + 1], [first + 10, first + 11]]


@row("S9", "all_to_all_single")
def test_all_to_all_of_one_tensor(ranks2: Any) -> None:
    ranks2.run(exchanges_one)


# ---- S10: backends -----------------------------------------------------------------------------------------------


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
def test_backend_strings(new_backend: str, text: str, wanted: str) -> None:
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
def test_one_python_backend_for_every_device(pool2: Any) -> None:
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


# ---- S10: reduce operations --------------------------------------------------------------------------------------

KINDS = [getattr(dist.ReduceOp, name) for name in "SUM AVG PRODUCT MIN MAX BAND BOR BXOR".split()]


def scaled() -> list[dist.ReduceOp]:
    """Sums with a factor, which only a torch with NCCL has."""
    return [dist._make_nccl_premul_sum(factor) for factor in (2.0, torch.tensor(1.0))]


@row("S10", "op_isinstance_of_reduceop")
def test_kinds_are_reduce_operations() -> None:
    assert all(isinstance(kind, dist.ReduceOp) for kind in KINDS)


@row("S10", "reduceop_copyable")
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_reduce_operations_can_be_copied(duplicate: Callable[[Any], Any]) -> None:
    for kind in KINDS:
        assert duplicate(kind) == kind
        assert duplicate(dist.ReduceOp(kind)) == kind


@row("S10", "reduceop_pickle")
def test_reduce_operations_can_be_pickled() -> None:
    for kind in KINDS:
        whole = dist.ReduceOp(kind)
        assert pickle.loads(pickle.dumps(whole)) == whole
        assert dist.ReduceOp(pickle.loads(pickle.dumps(kind))) == kind


@row("S10", "op_isinstance_of_reduceop")
@row("S10", "reduceop_copyable")
@row("S10", "reduceop_pickle")
@on_gpu
def test_scaled_sums_are_reduce_operations_too() -> None:
    for op in scaled():
        assert isinstance(op, dist.ReduceOp)
        assert copy.copy(op) == op == copy.deepcopy(op)
        assert pickle.loads(pickle.dumps(op)) == op


@row("S10", "reduceop_equal")
def test_reduce_operations_compare() -> None:
    for kind in KINDS:
        whole = dist.ReduceOp(kind)
        assert whole == dist.ReduceOp(kind)
        assert whole == kind
        for other in ("abc", None):
            assert whole != other
            assert kind != other
            assert other not in (kind, whole)
        assert [dist.ReduceOp(other) == kind for other in KINDS].count(True) == 1


# ---- S10: what the launcher says ---------------------------------------------------------------------------------


@pytest.fixture
def debug_level() -> Iterator[None]:
    before = dist.get_debug_level()
    yield
    dist.set_debug_level(before)


@row("S10", "debug_level")
@pytest.mark.parametrize("text", ["OFF", "off", "oFf", "INFO", "info", "INfO", "DETAIL", "detail", "DeTaIl", None])
def test_the_debug_level_is_read_in_any_case(
    text: str | None, debug_level: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is None:
        monkeypatch.delenv("TORCH_DISTRIBUTED_DEBUG", raising=False)
    else:
        monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", text)
    dist.set_debug_level(dist.DebugLevel.DETAIL if text is None else dist.DebugLevel.OFF)
    dist.set_debug_level_from_env()
    assert dist.get_debug_level() == getattr(dist.DebugLevel, (text or "OFF").upper())


@row("S10", "debug_level")
@pytest.mark.parametrize("text", ["foo", "0", "1", "-1"])
def test_a_bad_debug_level_raises(text: str, debug_level: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", text)
    with pytest.raises(ValueError, match="The value of TORCH_DISTRIBUTED_DEBUG must"):
        dist.set_debug_level_from_env()


@row("S10", "local_rank_without_env")
def test_a_missing_local_rank_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(RuntimeError, match="LOCAL_RANK"):
        dist.get_node_local_rank()


@row("S10", "local_rank_without_env_with_fallback")
def test_a_missing_local_rank_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert dist.get_node_local_rank(fallback_rank=2) == 2


def local_ranks() -> tuple[int, int]:
    return dist.get_node_local_rank(), dist.get_node_local_rank(fallback_rank=123)


@row("S10", "local_rank")
@row("S10", "local_rank_overrides_fallback")
def test_the_local_rank_is_read_and_counts_more_than_a_fallback(ranks4: Any) -> None:
    wanted = [0] * 4 if shared_gpu.ASKED and ranks4.backend == "nccl" else [*range(4)]
    assert ranks4.run(local_ranks) == [(rank, rank) for rank in wanted]
