"""NCCL's communicator, made in a thread: by whom, when, and what is waited for. Groups and GPUs are stand-ins."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from wholestep.ir.program import MeshAxis
from wholestep.runtime.distributed import nccl_connect

GPU = torch.device("cuda", 1)
AXIS = MeshAxis(name="data", size=2, group="ranks")


class Nccl:
    """What a process group says of a device, as far as it is asked. Connecting lasts until it may end."""

    def __init__(self, *, name: str = "nccl", connected: bool = False) -> None:
        self.name = lambda: name
        self.connected, self.may_end = connected, threading.Event()
        self.asked: list[tuple[torch.device, torch.device | None, bool]] = []
        """Devices that were to be connected, the current one, and whether this was in a thread."""

    def _is_initialized(self) -> bool:
        return self.connected

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.asked.append((device, current[-1], threading.current_thread() is not threading.main_thread()))
        assert self.may_end.wait(10)
        self.connected = True


current: list[torch.device | None] = [None]


@contextlib.contextmanager
def made_current(device: torch.device) -> Iterator[None]:
    current.append(device)
    yield
    current.pop()


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nccl]:
    """The group of `AXIS`. No thread ends with an error."""
    backend, errors = Nccl(), list[Any]()
    of(monkeypatch, backend)
    monkeypatch.setattr(torch.cuda, "device", made_current)
    monkeypatch.setattr(threading, "excepthook", errors.append)
    yield backend
    assert errors == []


def of(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    group = SimpleNamespace(_get_backend={GPU: backend, torch.device("cpu"): backend}.__getitem__)
    monkeypatch.setattr(nccl_connect, "group_named", {"ranks": group}.__getitem__)


def test_it_connects_beside_other_work(nccl: Nccl) -> None:
    nccl_connect.begin((AXIS,), GPU)
    assert not nccl.connected, "nobody has waited"
    threading.Timer(0.05, nccl.may_end.set).start()
    nccl_connect.wait()
    assert nccl.connected
    assert nccl.asked == [(GPU, GPU, True)]


def test_what_is_connected_is_left_alone(nccl: Nccl) -> None:
    nccl.may_end.set()
    for _ in range(2):
        nccl_connect.begin((AXIS,), GPU)
        nccl_connect.wait()
    assert len(nccl.asked) == 1


@pytest.mark.parametrize(
    ("axis", "device"),
    [(None, GPU), (MeshAxis(name="data", size=1, group="ranks"), GPU), (AXIS, torch.device("cpu"))],
    ids=["no axis", "one rank", "a CPU"],
)
def test_where_nothing_is_to_be_connected(nccl: Nccl, axis: MeshAxis | None, device: torch.device) -> None:
    nccl.may_end.set()
    nccl_connect.begin(() if axis is None else (axis,), device)
    nccl_connect.wait()
    assert nccl.asked == []


def test_others_connect_as_they_do(nccl: Nccl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another library, and a torch without these methods, of which neither is called alone."""
    other = Nccl(name="gloo")
    methods = {"_is_initialized": nccl._is_initialized, "eager_connect_single_device": nccl.eager_connect_single_device}
    for backend in (other, *(SimpleNamespace(name=nccl.name, **{one: held}) for one, held in methods.items())):
        of(monkeypatch, backend)
        nccl_connect.begin((AXIS,), GPU)
        assert nccl_connect._connecting == []
    assert nccl.asked == other.asked == []


def test_what_fails_is_left_to_the_first_collective(nccl: Nccl, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[torch.device] = []

    def fail(device: torch.device) -> None:
        tried.append(device)
        raise RuntimeError("no wire")

    monkeypatch.setattr(nccl, "eager_connect_single_device", fail)
    nccl_connect.begin((AXIS,), GPU)
    nccl_connect.wait()
    assert tried == [GPU]
