"""What compilers find out about themselves: in threads, once a process, and waited for where it is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from wholestep.config import Inductor
from wholestep.lower.auto_backend import backend_for
from wholestep.lower.codecache import toolchain_hash
from wholestep.lower.inductor import segment_compiler


class Works:
    """Stand-ins for both works, which last until they may end."""

    def __init__(self) -> None:
        self.may_end = {name: threading.Event() for name in ("inductor", "triton")}
        self.done: list[str] = []

    def work(self, name: str) -> Callable[[], None]:
        def stand_in() -> None:
            assert threading.current_thread() is not threading.main_thread()
            assert self.may_end[name].wait(10)
            self.done.append(name)

        return stand_in


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> Iterator[Works]:
    """A process in which nothing was begun. No thread ends with an error."""
    found, errors = Works(), list[Any]()
    monkeypatch.setattr(threading, "excepthook", errors.append)
    for name in found.may_end:
        monkeypatch.setattr(toolchain_hash, f"_{name}", found.work(name))
    toolchain_hash.start.cache_clear()
    yield found
    for event in found.may_end.values():
        event.set()
    for thread in toolchain_hash.start():
        thread.join()
    toolchain_hash.start.cache_clear()
    assert errors == []


WAITS = {"inductor": toolchain_hash.wait_for_inductor, "triton": toolchain_hash.wait_for_triton}


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_is_for_its_own(works: Works, name: str) -> None:
    (other,) = WAITS.keys() - {name}
    threads = toolchain_hash.start()
    assert works.done == []
    threading.Timer(0.05, works.may_end[name].set).start()
    WAITS[name]()
    assert works.done == [name]
    assert sum(thread.is_alive() for thread in threads) == 1
    works.may_end[other].set()
    WAITS[other]()
    assert works.done == [name, other]


def test_they_are_begun_once_by_whoever_comes_first(works: Works) -> None:
    for event in works.may_end.values():
        event.set()
    toolchain_hash.wait_for_triton()
    assert toolchain_hash.start() is toolchain_hash.start()
    for wait in WAITS.values():
        wait()
    assert sorted(works.done) == ["inductor", "triton"]
    assert all(thread.daemon for thread in toolchain_hash.start()), "a process that ends does not wait for them"


@pytest.mark.parametrize("name", WAITS)
def test_what_fails_is_left_to_who_needs_it(works: Works, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        works.done.append("failed")
        raise RuntimeError("there is no driver")

    monkeypatch.setattr(toolchain_hash, f"_{name}", fail)
    WAITS[name]()
    assert works.done == ["failed"]


# By the names that they have there: what is raised in these threads is told nowhere, and a new name would not be seen.


def test_inductor_is_asked_for_its_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("torch._inductor.codecache.torch_key", lambda: asked.append("torch"))
    toolchain_hash._inductor()
    assert asked == ["torch"]


def test_triton_is_asked_for_its_digest_and_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, asked = pytest.importorskip("triton.runtime.driver").driver, list[str]()
    monkeypatch.setattr("torch._inductor.runtime.triton_compat.triton_key", lambda: asked.append("Triton"))
    monkeypatch.setattr(type(driver), "active", property(lambda _: asked.append("the GPU")))
    toolchain_hash._triton()
    assert asked == ["Triton", "the GPU"]


GPU = torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("chosen", "device", "begins"),
    [
        ("inductor", GPU, True), ("auto", GPU, True), (Inductor(early_launches=True), GPU, True), ("eager", GPU, False),
        ("inductor", torch.device("cpu"), False), ("auto", torch.device("cpu"), False),
        (Inductor(), torch.device("cpu"), False),
    ],
    ids=lambda one: "options" if isinstance(one, Inductor) else str(one),
)  # fmt: skip
def test_a_step_that_may_have_kernels_on_a_gpu_begins_them(
    chosen: Any, device: torch.device, begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[bool] = []
    monkeypatch.setattr(toolchain_hash, "start", lambda: begun.append(True))
    monkeypatch.setattr(segment_compiler, "_choose_assembler", lambda: None)  # it changes the environment
    backend_for(chosen, device, pytest.fail, pytest.fail)
    assert begun == [True] * begins
