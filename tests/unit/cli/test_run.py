"""`wholestep run`: the command it becomes, its errors, and two real ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from wholestep.cli.common import options
from wholestep.cli.common.options import choose_nproc, threads_per_rank
from wholestep.cli.run import plan_launch
from wholestep.errors import ConfigError


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(
        "import os, sys\n"
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1)\n"
        "dist.all_reduce(total)\n"
        "if dist.get_rank() == 0:\n"
        "    print('heard', sys.argv[1:], int(total), os.environ['OMP_NUM_THREADS'])\n"
        "dist.destroy_process_group()\n"
    )
    return str(path)


def test_the_script_keeps_its_own_arguments(script: str) -> None:
    launch = plan_launch(script, ["--nproc", "7", "-h"], nproc=3)
    assert launch.argv[:3] == (sys.executable, "-m", "torch.distributed.run")
    assert launch.argv[launch.argv.index("--") + 1 :] == (script, "--nproc", "7", "-h")
    assert {"--standalone", "--nproc-per-node=3", "--nnodes=1"} <= set(launch.argv)


def test_threads_are_shared_out_unless_the_user_chose(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert plan_launch(script, [], nproc=3).environment["OMP_NUM_THREADS"] == "2"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert plan_launch(script, [], nproc=3).environment["OMP_NUM_THREADS"] == "5"
    assert threads_per_rank(100) == 1


def test_several_machines_meet_where_they_are_told(script: str) -> None:
    argv = plan_launch(script, [], nproc=2, nnodes=4, rendezvous="first:29400").argv
    assert {"--nnodes=4", "--rdzv-backend=c10d", "--rdzv-endpoint=first:29400"} <= set(argv)
    assert "--standalone" not in argv
    with pytest.raises(ConfigError, match="--rendezvous HOST:PORT"):
        plan_launch(script, [], nproc=2, nnodes=4)
    with pytest.raises(ConfigError, match="--nnodes"):
        plan_launch(script, [], nproc=2, nnodes=0)


def test_a_missing_script_is_named_and_a_module_needs_no_file() -> None:
    with pytest.raises(ConfigError, match=r"'nowhere\.py'"):
        plan_launch("nowhere.py", [], nproc=2)
    argv = plan_launch("package.train", ["x"], nproc=2, is_module=True).argv
    assert argv[-4:] == ("-m", "--", "package.train", "x")


@pytest.mark.parametrize(("gpus", "asked", "chosen"), [(0, None, 2), (0, 5, 5), (4, None, 4), (4, 3, 3)])
def test_ranks_by_default(gpus: int, asked: int | None, chosen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options.torch.cuda, "device_count", lambda: gpus)
    assert choose_nproc(asked) == chosen


@pytest.mark.parametrize(("gpus", "asked"), [(0, 0), (2, -1), (2, 3)])
def test_ranks_that_cannot_be(gpus: int, asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options.torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ConfigError, match=f"{asked}"):
        choose_nproc(asked)


@pytest.mark.ranks
def test_two_ranks_run_the_script(script: str) -> None:
    asked = [sys.executable, "-m", "wholestep", "run", "--nproc", "2", script, "--nproc", "x"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "heard ['--nproc', 'x'] 2 " in done.stdout
