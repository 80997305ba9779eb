"""Worlds made of real processes: start, barriers, errors that travel, deaths and hangs that are named."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.harness import fork_server
from wholestep.errors import CaptureError, ConfigError, RankMissingError
from wholestep.runtime.distributed.failure_report import named_failures
from wholestep.runtime.distributed.launch import RemoteTraceback
from wholestep.runtime.distributed.world import init, run

pytestmark = pytest.mark.ranks


def describe(scale):
    world = init()
    total = torch.full((3,), scale * (world.rank + 1))
    dist.all_reduce(total)
    gathered = [torch.zeros(1) for _ in range(world.size)]
    dist.all_gather(gathered, torch.tensor([float(world.mesh.get_local_rank())]), group=world.mesh.get_group())
    return {
        "rank": world.rank,
        "size": world.size,
        "local_rank": world.local_rank,
        "device": str(world.device),
        "axes": world.mesh.mesh_dim_names,
        "total": total,
        "gathered": [int(t) for t in gathered],
        "threads": torch.get_num_threads(),
        "again": init() is world and init("gloo") is world,
    }


def check_described(found, size):
    for rank, one in enumerate(found):
        assert torch.equal(one.pop("total"), torch.full((3,), 0.5 * sum(range(1, size + 1))))
        assert one == {
            "rank": rank,
            "size": size,
            "local_rank": rank,
            "device": "cpu",
            "axes": ("data",),
            "gathered": list(range(size)),
            "threads": int(os.environ.get("OMP_NUM_THREADS", "1")),
            "again": True,
        }


def test_two_ranks_find_each_other(pool2):
    check_described(pool2.run(describe, 0.5), 2)


def test_four_ranks_find_each_other(pool4):
    check_described(pool4.run(describe, 0.5), 4)


@pytest.mark.parametrize("nproc", [1, 2])
def test_run_starts_and_ends_processes_of_its_own(nproc):
    """Forked here; a script, below, spawns them."""
    with fork_server.instead_of_spawning():
        check_described(run(describe, nproc, 0.5, backend="gloo"), nproc)


def barriers():
    world = init()
    quick_s = []
    for _ in range(10):
        started = time.monotonic()
        world.barrier("same name")
        quick_s.append(time.monotonic() - started)
    if world.rank == 0:
        time.sleep(1.5)
    started = time.monotonic()
    world.barrier("late")
    return min(quick_s), time.monotonic() - started  # the quickest: others may use the cores, too


def test_a_barrier_waits_for_the_slowest_and_costs_little(pool2):
    (quick_0, waited_0), (quick_1, waited_1) = pool2.run(barriers)
    assert max(quick_0, quick_1) < 0.1
    assert waited_1 > 0.75 > waited_0


def refuses_another_backend():
    with pytest.raises(ConfigError, match="in a World that uses 'gloo'"):
        init("cpu:gloo,cuda:nccl")


def test_a_second_backend_is_refused(pool2):
    pool2.run(refuses_another_backend)


def adopts():
    """A program that made its process group itself."""
    init().close()
    assert not dist.is_initialized()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("mine", store), rank=rank, world_size=size)
    world = init()
    world.barrier("adopted")
    mesh_size = world.mesh.size()
    world.close()
    still_there = dist.is_initialized()
    with pytest.raises(ConfigError, match="closed or replaced"):
        world.barrier("after the end")
    dist.destroy_process_group()
    new = init()
    new.barrier("new")
    return (world.rank, world.size, mesh_size, still_there, new.size)


def test_an_existing_group_is_adopted_and_left_alone(pool2):
    assert pool2.run(adopts) == [(0, 2, 2, True, 2), (1, 2, 2, True, 2)]


# ---- errors that travel ------------------------------------------------------------------------------------------


class Odd(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def raises_on(rank, kind):
    world = init()
    if world.rank == rank:
        raise {"capture": CaptureError("train.py:3: loss.item()"), "odd": Odd(1, 2), "key": KeyError("k")}[kind]
    dist.all_reduce(torch.ones(1))  # waits for a rank that will not come


def test_an_error_keeps_its_class_and_says_its_rank(pool2):
    with pytest.raises(CaptureError, match=r"train\.py:3") as caught:
        pool2.run(raises_on, 1, "capture", grace_s=0.2)
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert "raised on rank 1 of 2" in str(caught.value.__cause__)
    assert "in raises_on" in str(caught.value.__cause__)
    check_described(pool2.run(describe, 0.5), 2)


def test_an_error_that_cannot_travel_is_told_in_words(pool2):
    with pytest.raises(RuntimeError, match="Rank 0 raised Odd: 1 and 2"):
        pool2.run(raises_on, 0, "odd", grace_s=0.2)


def leaves_a_collective_open():
    world = init()
    if world.rank == 0:
        dist.all_reduce(torch.ones(1), async_op=True)
    raise KeyError("both")


def test_after_an_error_on_all_ranks_the_same_processes_go_on(pool2):
    before = pool2.run(os.getpid)
    with pytest.raises(KeyError):
        pool2.run(leaves_a_collective_open)
    assert pool2.run(os.getpid) == before
    check_described(pool2.run(describe, 0.5), 2)


def ends(how):
    world = init()
    if world.rank == 1:
        if how == "os._exit":
            os._exit(7)
        if how == "sys.exit":
            sys.exit(5)
        os.kill(os.getpid(), signal.SIGKILL)
    world.barrier("never", timeout_s=30)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("os._exit", "ended with exit status 7"),
        ("sys.exit", "ended with exit status 5"),
        ("SIGKILL", "ended by signal SIGKILL"),
    ],
)
def test_a_rank_that_dies_is_named_with_its_end(pool2, how, words):
    # After sys.exit the other rank hears a farewell first, and the parent waits for the end itself.
    with pytest.raises(RankMissingError, match=f"Rank 1 of 2 .*{words}"):
        pool2.run(ends, how, grace_s=10 if how == "sys.exit" else 0.2)


def hangs(errors):
    if init().rank == 1:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
        time.sleep(60)
    return "done"


def test_a_rank_that_hangs_is_named_after_the_timeout(pool2, tmp_path):
    pool2.begin()
    started = time.monotonic()
    with pytest.raises(RankMissingError, match=r"Rank 1 of 2 did not finish .* rank 0 did"):
        pool2.run(hangs, tmp_path / "errors", timeout_s=8)
    assert time.monotonic() - started < 30
    assert "in hangs" in (tmp_path / "errors").read_text()  # the stack of the rank that hung


def returns_what_cannot_travel():
    return lambda: None


def test_what_cannot_travel_is_refused_with_a_reason(pool2):
    with fork_server.instead_of_spawning(), pytest.raises(ConfigError, match="top level of a module"):
        run(lambda: None, 2)
    with pytest.raises(ConfigError, match="cannot be sent back"):
        pool2.run(returns_what_cannot_travel)


# ---- failures in the middle of a step ----------------------------------------------------------------------------


def fails_midway(how, victim):
    """Returns the error that this rank ends with; the victim goes at the third step."""
    world = init()
    try:
        for step in range(5):
            with named_failures(world, lambda step=step: f"train_step, call {step}"):
                if world.rank == victim and step == 2:
                    if how == "dies":
                        os._exit(9)
                    sys.exit(0)
                dist.all_reduce(torch.ones(1000))
    except RankMissingError as error:
        return error, type(error.__cause__)
    return "finished", None


def ends_as_a_program_does(victim, folder):
    """Ranks that wait for a survivor notice that it ended: its connections close with its process."""
    started = time.monotonic()
    error, _ = fails_midway("dies", victim)
    (folder / f"{init().rank}").write_text(f"{time.monotonic() - started} {error}")
    os._exit(8)


@pytest.mark.parametrize("victim", [0, 3])
def test_survivors_name_the_rank_that_died_midway(pool4, tmp_path, victim):
    with pytest.raises(RankMissingError, match=f"Rank {victim} of 4 ended with exit status 9"):
        pool4.run(ends_as_a_program_does, victim, tmp_path, grace_s=50)
    for survivor in set(range(4)) - {victim}:
        waited_s, _, message = (tmp_path / f"{survivor}").read_text().partition(" ")
        assert message.startswith(f"Rank {victim} of 4 died during train_step, call 2")
        assert float(waited_s) < 30  # the timeout of the collective itself is longer


def runs_out_of_data(folder):
    error, cause = fails_midway("ends", 1)
    (folder / "verdict").write_text(f"{error} from {cause.__name__}")


def test_a_rank_that_ended_early_is_named(pool2, tmp_path):
    with pytest.raises(RankMissingError, match="Rank 1 of 2 ended with exit status 0"):
        pool2.run(runs_out_of_data, tmp_path, grace_s=20)
    verdict = (tmp_path / "verdict").read_text()
    assert verdict.startswith("Rank 1 of 2 ended while rank 0 needed it in train_step, call 2:")
    assert "rank 1 ended its program." in verdict
    assert verdict.endswith("from RuntimeError")


def sleeps_midway():
    world = init()
    with named_failures(world, lambda: "train_step, call 0"):
        dist.all_reduce(torch.ones(1))
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=3))
    if world.rank == 1:
        time.sleep(4)
        return ""
    with pytest.raises(RankMissingError) as caught, named_failures(world, lambda: "train_step, call 1"):
        dist.all_reduce(torch.ones(1), group=group)
    return str(caught.value)


def test_a_rank_that_is_elsewhere_is_named_after_the_timeout_of_the_group(pool2):
    message = pool2.run(sleeps_midway)[0]
    assert message.startswith("Rank 1 of 2 did not take part in train_step, call 1, though alive.")
    assert "rank 1: outside of any compiled step" in message


def other_errors_pass():
    world = init()
    with pytest.raises(ZeroDivisionError), named_failures(world, lambda: "step"):
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="mat1"), named_failures(world, lambda: "step"):
        torch.ones(2, 3) @ torch.ones(2, 3)


def test_errors_of_other_kinds_are_left_alone(pool2):
    pool2.run(other_errors_pass)


# ---- programs of their own ---------------------------------------------------------------------------------------


def program(body, tmp_path, *arguments):
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(body))
    return subprocess.run(
        [sys.executable, *arguments, str(file)], capture_output=True, text=True, timeout=240, check=False
    )


def test_a_script_under_torchrun_finds_its_world(tmp_path):
    body = """
        import torch, torch.distributed as dist
        from wholestep.runtime.distributed.world import init
        world = init("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        world.barrier("done")
        open(__file__ + f".{world.rank}", "w").write(f"{world.size} {int(total)}")
        world.close()
    """
    result = program(body, tmp_path, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
    assert result.returncode == 0, result.stderr
    assert [(tmp_path / f"program.py.{rank}").read_text() for rank in range(2)] == ["2 2", "2 2"]


def test_a_script_may_run_its_own_functions_and_ends_cleanly(tmp_path):
    body = """
        import os, torch, torch.distributed as dist
        from wholestep.runtime.distributed.world import init, run
        def rank():
            world, total = init("gloo"), torch.ones(1)
            dist.all_reduce(total)
            return world.rank, world.size, int(total), torch.get_num_threads(), os.environ["LOCAL_RANK"]
        if __name__ == "__main__":
            print(run(rank, 2, backend="gloo"))
    """
    result = program(body, tmp_path)
    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    assert result.stdout.strip() == str([(0, 2, 2, threads, "0"), (1, 2, 2, threads, "1")]), result.stderr
    assert result.returncode == 0


def test_a_script_without_a_main_guard_is_told_so(tmp_path):
    body = """
        from wholestep.runtime.distributed.world import init, run
        def rank():
            return init().rank
        print(run(rank, 2))
    """
    result = program(body, tmp_path)
    assert result.returncode != 0
    assert 'under `if __name__ == "__main__":`' in result.stderr


def test_a_function_typed_into_a_console_is_told_to_move():
    """Where cloudpickle is installed, too, which would take it: here it cannot be imported."""
    typed = (
        "import sys\nsys.modules['cloudpickle'] = None\n"
        "from wholestep.runtime.distributed.world import run\ndef f(): return 1\nrun(f, 1)\n"
    )
    for command, words in (([sys.executable, "-c", typed], "%%writefile"), ([sys.executable, "-"], "standard input")):
        result = subprocess.run(command, input=typed, capture_output=True, text=True, timeout=240, check=False)
        assert result.returncode != 0
        assert words in result.stderr
