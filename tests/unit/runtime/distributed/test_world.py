"""What `init` and `run` make of environments and arguments, without a second process."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.harness import fork_server
from wholestep.errors import ConfigError, InternalError, RankMissingError
from wholestep.runtime.distributed.consensus import default_store
from wholestep.runtime.distributed.launch import VARIABLES
from wholestep.runtime.distributed.world import announce, close_current, init, run

WHOLE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@pytest.fixture(autouse=True)
def no_world(monkeypatch):
    for name in (*VARIABLES, "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    close_current()
    yield
    close_current()
    assert not dist.is_initialized()


def set_environment(monkeypatch, **changes):
    for name, value in {**WHOLE, **changes}.items():
        if value is not None:
            monkeypatch.setenv(name, value)


def test_a_single_process_has_no_group():
    world = init("gloo")
    assert (world.rank, world.size, world.local_rank, world.mesh) == (0, 1, 0, None)
    assert world.device == torch.device("cpu")
    assert init() is world
    assert not dist.is_initialized()
    world.barrier("alone")
    assert world.departed([0]) == {}


def test_a_launcher_with_one_process_makes_a_group(monkeypatch):
    set_environment(monkeypatch)
    world = init("gloo")
    assert world.mesh is not None
    assert world.mesh.size() == 1
    assert dist.get_world_size() == 1
    default_store().set("key", "value")
    world.close()
    world.close()
    assert not dist.is_initialized()
    with pytest.raises(ConfigError, match="closed or replaced"):
        world.barrier("after")


@pytest.mark.parametrize(("asked_s", "waits_s"), [(None, 21.5), (3.0, 3.0), (100.0, 21.5)])
def test_ranks_wait_no_longer_than_their_group(asked_s, waits_s):
    group = {"store": dist.HashStore(), "rank": 0, "world_size": 1, "timeout": timedelta(seconds=21.5)}
    dist.init_process_group("gloo", **group)
    try:
        assert init(timeout_s=asked_s).timeout_s == waits_s
        close_current()
    finally:
        dist.destroy_process_group()


def test_ranks_wait_ten_minutes_where_nobody_says():
    assert init("gloo").timeout_s == 600.0


@pytest.mark.parametrize("name", VARIABLES)
def test_a_missing_variable_is_named(monkeypatch, name):
    set_environment(monkeypatch, **{name: None})
    with pytest.raises(ConfigError, match=f"set by half: {name} is missing"):
        init("gloo")


def test_several_missing_variables_are_named(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("WORLD_SIZE", "")
    with pytest.raises(ConfigError, match="RANK, WORLD_SIZE, LOCAL_RANK, MASTER_PORT are missing"):
        init("gloo")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"RANK": "one"}, "RANK wants a whole number, got 'one'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 wants to be"),
        ({"RANK": "-1"}, "RANK=-1 wants to be"),
        ({"WORLD_SIZE": "0"}, "less than WORLD_SIZE=0"),
        ({"LOCAL_RANK": "4", "WORLD_SIZE": "2"}, "LOCAL_RANK=4 wants to be"),
    ],
)
def test_values_that_make_no_sense_are_named(monkeypatch, changes, words):
    set_environment(monkeypatch, **changes)
    with pytest.raises(ConfigError, match=words):
        init("gloo")


def test_unknown_backends_and_timeouts_are_refused():
    with pytest.raises(ConfigError, match="'glue' is no backend"):
        init("glue")
    with pytest.raises(ConfigError, match="positive number of seconds"):
        init(timeout_s=0)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="wants CUDA and NCCL"):
            init("nccl")


def test_a_rank_that_never_starts_is_named(monkeypatch):
    """Rank 0 of 2 comes alone."""
    set_environment(monkeypatch, WORLD_SIZE="2")
    with pytest.raises(RankMissingError, match=r"Rank 1 of 2 did not come to the rendezvous in \d+\.\d s"):
        init("gloo", timeout_s=0.5)
    assert not dist.is_initialized()


def test_a_group_made_after_init_is_adopted(monkeypatch):
    alone = init("gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = init()
    assert world is not alone
    assert world.mesh is not None
    world.close()
    assert dist.is_initialized()
    dist.destroy_process_group()


def test_a_group_that_the_user_made_needs_no_launcher(monkeypatch):
    """LOCAL_RANK counts, and what else torchrun would set may be missing."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = init()
    assert (world.rank, world.size, world.local_rank, world.device) == (0, 1, 3, torch.device("cpu"))
    world.close()
    dist.destroy_process_group()


def test_the_store_needs_a_group():
    with pytest.raises(InternalError, match="before a process group existed"):
        default_store()


@pytest.mark.parametrize("nproc", [0, -1, 1.5, True, "2"])
def test_run_wants_a_number_of_processes(nproc):
    with pytest.raises(ConfigError, match="positive number of processes"):
        run(print, nproc)


def test_run_leaves_the_environment_as_it_was(monkeypatch):
    monkeypatch.setenv("RANK", "kept")
    with fork_server.instead_of_spawning():
        assert run(int, 1, "3", backend="gloo") == [3]
    assert os.environ["RANK"] == "kept"
    assert "MASTER_PORT" not in os.environ


def test_a_group_whose_store_is_none_ends_as_ever() -> None:
    """The farewell of a rank has nowhere to go; it must not keep the group from ending."""
    announce()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    dist.destroy_process_group()
    assert not dist.is_initialized()
