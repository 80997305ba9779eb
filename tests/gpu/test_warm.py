"""A second process on GPUs starts warm: with empty caches of Inductor and Triton it compiles nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu


def process(ranks: int, steps: Path, kernels: Path) -> list[dict[str, Any]]:
    """What the ranks of a new process say, with `steps` for saved steps and `kernels` for those of the compilers."""
    env = {
        **os.environ, "WHOLESTEP_CACHE": "1", "XDG_CACHE_HOME": str(steps), "PYTHONWARNINGS": "ignore",
        "TORCHINDUCTOR_CACHE_DIR": str(kernels / "inductor"), "TRITON_CACHE_DIR": str(kernels / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # what is compiled is compiled in this process, which counts it
    }  # fmt: skip
    found = subprocess.run(
        [sys.executable, "-m", "tests.gpu.warm_process", str(ranks)],
        env=env, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-4000:]
    assert "is not kept for other processes" not in found.stderr, found.stderr[-4000:]
    assert "is compiled in every process" not in found.stderr, found.stderr[-4000:]
    assert "is compiled anew" not in found.stderr, found.stderr[-4000:]
    said: list[dict[str, Any]] = json.loads(found.stdout.splitlines()[-1])
    print(*said, sep="\n")
    return said


def starts_warm(cold: list[dict[str, Any]], warm: list[dict[str, Any]]) -> None:
    assert [one["loaded"] for one in cold] == [0] * len(cold)
    assert all(one["compiled"]["inductor"] for one in cold)
    assert [one["loaded"] for one in warm] == [1] * len(cold)
    assert [one["compiled"] for one in warm] == [{"inductor": 0, "triton": 0}] * len(cold)
    assert [one["backend"] for one in warm] == [one["backend"] for one in cold]
    assert all(one["backend"] == "inductor, one CUDA graph" for one in warm)
    for a, b in zip(cold, warm, strict=True):
        assert a["device"] == b["device"]
        assert a["losses"] == b["losses"]
        assert a["state"] == b["state"]


@pytest.mark.timeout(600)
def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    cold = process(1, tmp_path / "steps", tmp_path / "kernels")
    assert cold[0]["compiled"]["triton"]
    starts_warm(cold, process(1, tmp_path / "steps", tmp_path / "other kernels"))


@pytest.mark.timeout(600)
def test_what_inductor_found_in_its_cache_is_kept_too(tmp_path: Path) -> None:
    """Its kernels are those of the cache, which have run by the time they are written."""
    process(1, tmp_path / "steps", tmp_path / "kernels")
    found = process(1, tmp_path / "other steps", tmp_path / "kernels")
    starts_warm(found, process(1, tmp_path / "other steps", tmp_path / "other kernels"))


@pytest.mark.timeout(600)
def test_two_ranks_compile_nothing(tmp_path: Path) -> None:
    cold = process(2, tmp_path / "steps", tmp_path / "kernels")
    assert [one["device"] for one in cold] == ["cuda:0", "cuda:1"]
    starts_warm(cold, process(2, tmp_path / "steps", tmp_path / "other kernels"))
