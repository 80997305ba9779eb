"""Kernels of ours that are built in threads: what is done there, and who waits for it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from wholestep.lower.codecache import toolchain_hash, triton_cache
from wholestep.lower.kernels import add_chunks, column_sum, cross_entropy, row_sum
from wholestep.util import background

GPU = torch.device("cuda", 1)


class Compiled:
    """What Triton gives."""

    def __init__(self, name: str) -> None:
        self.hash, self.made_ready_by = name, list[threading.Thread]()

    def _init_handles(self) -> None:
        self.made_ready_by.append(threading.current_thread())


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.device]]:
    """The devices that were made current; nothing is kept or under way after a test."""
    devices: list[torch.device] = []

    @contextlib.contextmanager
    def made_current(device: torch.device) -> Iterator[None]:
        devices.append(device)
        yield

    monkeypatch.setattr(torch.cuda, "device", made_current)
    monkeypatch.setattr(toolchain_hash, "wait_for_triton", lambda: None)
    monkeypatch.setattr(triton_cache, "_kept", {})
    yield devices
    triton_cache.wait()
    assert triton_cache._builds == []


def test_each_is_built_with_its_launcher_in_a_thread(current: list[torch.device]) -> None:
    """Side by side: each waits for the others to begin."""
    together, made = threading.Barrier(3), [Compiled("a"), Compiled("b")]

    def job(one: Compiled) -> Any:
        def build() -> Compiled:
            together.wait(10)
            return one

        return build

    triton_cache.build_in_background(map(job, made), GPU)
    together.wait(10)
    assert triton_cache.kept_kernels() == sorted(made, key=triton_cache.kept_kernels().index)
    assert {one.hash for one in triton_cache.kept_kernels()} == {"a", "b"}
    assert current == [GPU, GPU]
    threads = [thread for one in made for thread in one.made_ready_by]
    assert len(set(threads)) == 2
    assert threading.main_thread() not in threads


def test_who_asks_for_what_is_kept_waits(current: list[torch.device]) -> None:
    may_end = threading.Event()
    triton_cache.build_in_background([lambda: may_end.wait(10) and Compiled("late")], GPU)
    threading.Timer(0.05, may_end.set).start()
    assert [one.hash for one in triton_cache.kept_kernels()] == ["late"]


def test_what_fails_is_told_where_it_is_launched(current: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[Any]()
    monkeypatch.setattr(threading, "excepthook", told.append)
    triton_cache.build_in_background([lambda: 1 / 0, lambda: Compiled("good")], GPU)
    assert [one.hash for one in triton_cache.kept_kernels()] == ["good"]
    assert told == []


def test_a_program_that_ends_builds_nothing_more(current: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "is_ending", lambda: True)
    triton_cache.build_in_background([lambda: pytest.fail("it was built")], GPU)
    assert triton_cache.kept_kernels() == current == []


def test_a_triton_that_makes_launchers_otherwise(current: list[torch.device]) -> None:
    triton_cache.build_in_background([lambda: SimpleNamespace(hash="other")], GPU)
    assert [one.hash for one in triton_cache.kept_kernels()] == ["other"]


def launch_rows() -> None:
    row_sum.sum_rows([torch.zeros(512, 8)], 512, [8], torch.float32, torch.float32)


def launch_columns() -> None:
    column_sum.column_sums(torch.zeros(2 * 512 * 8), 2, 512, 8)


def launch_addition() -> None:
    add_chunks.add_parts(torch.zeros(2, 16), *torch.zeros(3, 16), rank=0, averages=True)


def launch_cross_entropy() -> None:
    cross_entropy.cross_entropy(torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64), torch.tensor(0.25), -100)


@pytest.mark.parametrize(
    ("module", "kernels", "launch"),
    [
        (row_sum, ["_rows_kernel", "_parts_kernel"], launch_rows), (column_sum, ["_kernel"], launch_columns),
        (add_chunks, ["_kernel"], launch_addition), (cross_entropy, ["_kernel"], launch_cross_entropy),
    ],
    ids=["rows", "columns", "addition", "cross-entropy"],
)  # fmt: skip
def test_a_launch_waits_for_what_is_built(
    module: Any, kernels: list[str], launch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else both would compile it."""
    happened: list[str] = []

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **kwargs: happened.append("launched")

    monkeypatch.setattr(triton_cache, "wait", lambda: happened.append("waited"))
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: contextlib.nullcontext())
    for kernel in kernels:
        monkeypatch.setattr(module, kernel, Kernel())
    launch()
    assert happened == ["waited"] + ["launched"] * len(kernels)
