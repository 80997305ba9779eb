"""A second rank on GPUs compiles nothing, and neither does a second process, both with empty caches of compilers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness import shared_gpu
from tests.harness.rank_pools import needs_gpus

pytestmark = pytest.mark.gpu


NOTHING = {"inductor": 0, "triton": 0}


def process(ranks: int, steps: Path, kernels: Path, *words: str, deterministic: bool = False) -> list[dict[str, Any]]:
    """What the ranks of a new process say, with `steps` for saved steps and `kernels` for those of the compilers.

    `deterministic`: block sizes that the bits of a sum depend on are not measured.
    """
    env = {
        **os.environ, "WHOLESTEP_CACHE": "1", "XDG_CACHE_HOME": str(steps), "PYTHONWARNINGS": "ignore",
        "TORCHINDUCTOR_CACHE_DIR": str(kernels / "inductor"), "TRITON_CACHE_DIR": str(kernels / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # what is compiled is compiled in this process, which counts it
        "TORCHINDUCTOR_DETERMINISTIC": str(int(deterministic)),
    }  # fmt: skip
    found = subprocess.run(
        [sys.executable, "-m", "tests.gpu.warm_process", str(ranks), *words],
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
    assert cold[0]["compiled"]["inductor"]
    assert [one["loaded"] for one in warm] == [1] * len(cold)
    assert [one["compiled"] for one in warm] == [NOTHING] * len(cold)
    assert [one["backend"] for one in warm] == [one["backend"] for one in cold]
    assert all(one["backend"] == "inductor, one CUDA graph" for one in warm)
    equal(cold, warm)


def equal(some: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    """The same training, to the bit, on the same devices."""
    for one, other in zip(some, others, strict=True):
        assert one["device"] == other["device"]
        assert one["losses"] == other["losses"]
        assert one["state"] == other["state"]


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


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of a process with two ranks, in which nothing was before, and what it says."""
    needs_gpus(2)
    folder = tmp_path_factory.mktemp("two ranks")
    return folder, process(2, folder / "steps", folder / "kernels")


def second_compiles_nothing(said: list[dict[str, Any]]) -> None:
    first, second = said
    assert [one["device"] for one in said] == (["cuda:0"] * 2 if shared_gpu.ASKED else ["cuda:0", "cuda:1"])
    assert [one["backend"] for one in said] == ["inductor, one CUDA graph"] * 2
    assert second["compiled"] == NOTHING, (second["kernels"], second["told"])
    assert second["told"] == []
    assert first["compiled"]["inductor"] > 0


@pytest.mark.timeout(600)
def test_the_second_rank_compiles_nothing(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    _, said = two_ranks
    second_compiles_nothing(said)
    assert said[0]["compiled"]["triton"] > 0


@pytest.mark.timeout(600)
def test_nor_does_it_what_inductor_found_in_the_cache_of_the_first(
    two_ranks: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, _ = two_ranks
    said = process(2, folder / "other steps", folder / "kernels")
    second_compiles_nothing(said)


@pytest.mark.timeout(600)
def test_two_ranks_start_warm(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, cold = two_ranks
    starts_warm(cold, process(2, folder / "steps", folder / "warm kernels"))


@pytest.mark.timeout(600)
def test_it_is_as_if_both_had_compiled(tmp_path: Path) -> None:
    needs_gpus(2)
    shared = process(2, tmp_path / "shared", tmp_path / "shared kernels", deterministic=True)
    second_compiles_nothing(shared)
    apart = process(2, tmp_path / "apart", tmp_path / "apart kernels", "ALONE", deterministic=True)
    assert apart[0]["compiled"] == apart[1]["compiled"] == shared[0]["compiled"]
    assert all("this rank compiles for itself" in line for line in apart[1]["told"])
    equal(shared, apart)
