"""A stand-in for what a capture asks of torch.cuda, which writes down what it is asked."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch


class FakeStream(str):
    """A stream by its name; `log` is that of `FakeCuda`."""

    log: list[str]

    def wait_stream(self, other: str) -> None:
        self.log.append(f"{self} waits for {other}")


class FakeCuda:
    """What a capture asks of torch.cuda, written down in `log`. A stream that captures is left current by an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.stream = self.make_Stream("users")
        self.full = False
        """Whether there is no memory for another graph."""
        self.free_bytes = 1 << 40
        """The largest piece of memory that there is."""
        self.num_clears = 0
        """How often workspaces of cuBLAS were given up."""
        self.numbers = itertools.count(1)
        self.alive: set[str] = set()
        for name in ("graph", "CUDAGraph", "device", "Stream", "stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, f"make_{name}"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.stream)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(self, "stream", stream))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: f"pool {next(self.numbers)}")
        monkeypatch.setattr(torch.cuda, "caching_allocator_alloc", self.allocate)
        monkeypatch.setattr(torch.cuda, "caching_allocator_delete", lambda given: self.log.append(f"{given} free"))
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", self.clear_workspaces, raising=False)
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            told = partial(lambda what, *args: self.log.append(f"{what} {args}"), name)
            monkeypatch.setattr(torch._C, name, told, raising=False)

    def clear_workspaces(self) -> None:
        assert self.stream == "users", "a graph is being captured"
        self.num_clears += 1

    def allocate(self, num_bytes: int, device: torch.device, stream: str) -> str:
        if num_bytes > self.free_bytes:
            raise torch.OutOfMemoryError("out of memory")
        self.log.append(f"{num_bytes} bytes on {stream}")
        return f"{num_bytes} bytes"

    def make_CUDAGraph(self, keep_graph: bool = False) -> Any:
        fake, name = self, f"graph {next(self.numbers)}"
        self.alive.add(name)

        class Graph:
            def instantiate(self) -> None:
                assert keep_graph
                if fake.full:
                    raise RuntimeError("out of memory")

            def capture_end(self) -> None:
                fake.log.append(f"end of {name}")

            def reset(self) -> None:
                fake.log.append(f"reset of {name}")

            def __del__(self) -> None:
                fake.alive.discard(name)

            def __str__(self) -> str:
                return name

        return Graph()

    def make_Stream(self, name: str = "") -> FakeStream:
        made = FakeStream(name or f"stream {next(self.numbers)}")
        made.log = self.log
        return made

    @contextlib.contextmanager
    def make_stream(self, stream: str) -> Iterator[None]:
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    make_device = contextlib.nullcontext

    @contextlib.contextmanager
    def make_graph(self, graph: Any, *, pool: str, stream: str, capture_error_mode: str) -> Iterator[None]:
        self.log.append(f"capture into {pool}, {capture_error_mode}")
        before, self.stream = self.stream, stream
        try:
            yield
        except Exception:
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904
        self.stream = before
