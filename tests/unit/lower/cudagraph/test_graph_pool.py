"""Captures into the memory that graphs share, and torch after captures that have failed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.unit.lower.cudagraph.fake_cuda import FakeCuda
from wholestep.lower.cudagraph import memset_nodes
from wholestep.lower.cudagraph.graph_pool import Pool
from wholestep.lower.cudagraph.graph_runner import _cause


def test_a_pool_outlives_its_graphs(cuda: FakeCuda) -> None:
    pool = Pool(torch.device("cpu"))
    assert cuda.log == []
    graph, results = pool.capture(lambda: ("result",))
    assert results == ("result",)
    # What a capture has its own stream do comes before what the user's does with the graph.
    assert cuda.log == ["capture into pool 1, thread_local", "users waits for stream 2"] * 2
    gone = str(graph)
    del graph
    assert gone not in cuda.alive
    assert len(cuda.alive) == 1
    pool.capture(lambda: ())
    assert set(cuda.log) == {"capture into pool 1, thread_local", "users waits for stream 2"}


class Nobody:
    """A member of a pool."""

    def give_up(self) -> None:
        raise AssertionError("nobody is asked to")


def test_a_pool_begins_with_room_for_its_members_in_one_piece(cuda: FakeCuda) -> None:
    pool, members = Pool(torch.device("cpu")), [Nobody(), Nobody()]
    pool.add(members[0], 1000)
    pool.add(members[1], 100)
    pool.capture(lambda: ())
    room = ["1020 bytes on stream 2", "1020 bytes free"]
    captured = ["capture into pool 1, thread_local", "users waits for stream 2"]
    assert cuda.log == [captured[0], *room, captured[1], *captured]
    del cuda.log[:]
    pool.capture(lambda: ())
    assert cuda.log == captured
    with pytest.raises(RuntimeError):
        pool.capture(lambda: [][0])
    pool.capture(lambda: ())
    new = next(line for line in reversed(cuda.log) if line.startswith("capture"))
    assert new != captured[0]
    assert cuda.log.count("1020 bytes free") == 1
    assert cuda.log.index("1020 bytes free") > cuda.log.index(new)  # who captures again has room, too


def test_no_workspace_stays_in_a_pool(cuda: FakeCuda) -> None:
    """It would keep the piece that it was cut from, which is all of the pool."""
    pool = Pool(torch.device("cpu"))
    pool.capture(lambda: ())
    assert cuda.num_clears == 1
    with pytest.raises(RuntimeError):
        pool.capture(lambda: [][0])
    assert cuda.num_clears == 2


def test_without_a_piece_as_large_a_step_is_captured_all_the_same(cuda: FakeCuda) -> None:
    pool, member = Pool(torch.device("cpu")), Nobody()
    pool.add(member, 1000)
    cuda.free_bytes = 1019
    assert pool.capture(lambda: ("result",))[1] == ("result",)
    assert cuda.log == ["capture into pool 1, thread_local", "users waits for stream 2"] * 2


def test_nothing_is_collected_during_a_capture(cuda: FakeCuda) -> None:
    pool, seen = Pool(torch.device("cpu")), []

    def body() -> tuple[()]:
        seen.append(gc.isenabled())
        if len(seen) == 2:
            raise ValueError("refused")
        return ()

    pool.capture(body)
    with pytest.raises(RuntimeError, match="previous error"):
        pool.capture(body)
    assert seen == [False, False]
    assert gc.isenabled()


def test_garbage_is_looked_for_before_the_first_capture_alone(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes longer than many captures."""
    pool, found = Pool(torch.device("cpu")), []
    monkeypatch.setattr(gc, "collect", lambda: found.append(len(cuda.log)))
    for _ in range(3):
        pool.capture(lambda: ())
    assert found == [0]


@pytest.mark.parametrize(("free_bytes", "is_short"), [(1000, False), (15, True)])
def test_a_device_with_little_free_memory(free_bytes: int, is_short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes, 64 * 16))
    assert Pool(torch.device("cuda", 0)).is_short_of_memory() == is_short
    assert not Pool(torch.device("cpu")).is_short_of_memory()


def test_torch_is_mended_after_a_capture_that_failed(cuda: FakeCuda) -> None:
    pool = Pool(torch.device("cpu"))
    pool.capture(lambda: ())
    del cuda.log[:]

    def body() -> tuple[()]:
        assert cuda.stream != "users"
        error = RuntimeError("operation not permitted when stream is capturing\nand more")
        error.add_note("while running item (my::op) from train.py:7")
        raise error

    with pytest.raises(RuntimeError, match="previous error") as found:
        pool.capture(body)
    assert _cause(found.value) == (
        "operation not permitted when stream is capturing, while running item (my::op) from train.py:7"
    )
    assert cuda.stream == "users"
    begun, ended, waits, reset, *rest = cuda.log
    assert begun == "capture into pool 1, thread_local"
    assert ended.removeprefix("end of ") == reset.removeprefix("reset of ")
    # A capture that goes well, in another pool, is what frees the random generator.
    assert rest[:2] == ["_cuda_endAllocateToPool (3, 'pool 1')", "_cuda_releasePool (3, 'pool 1')"]
    assert rest[2].startswith("capture into pool ")
    assert rest[2] != begun
    assert (waits, rest[3]) == ("users waits for stream 2", "users waits for stream 7")
    del cuda.log[:]
    pool.capture(lambda: ())
    begun_anew, *_ = cuda.log
    assert cuda.log[-2] == begun_anew
    assert begun_anew not in (begun, rest[2])  # the pool of that capture has gone with it


def test_torch_is_mended_where_a_graph_cannot_be_made_ready(cuda: FakeCuda) -> None:
    pool = Pool(torch.device("cpu"))
    pool.capture(lambda: ())
    del cuda.log[:]
    cuda.full = True
    with pytest.raises(RuntimeError, match="out of memory"):
        pool.capture(lambda: ())
    assert cuda.stream == "users"
    assert [line.split()[0] for line in cuda.log] == ["capture", "users"]  # that went well, so there is nothing to mend
    cuda.full = False
    assert pool.capture(lambda: ("result",))[1] == ("result",)


def test_torch_is_mended_where_fills_cannot_be_captured(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in for memsets is captured after the step, which keeps its graph."""

    def as_kernels(graph: Any, capture: Callable[[Callable[[], object]], Any], device: torch.device) -> int:
        with pytest.raises(RuntimeError, match="previous error"):
            capture(lambda: [][0])
        return 0

    pool = Pool(torch.device("cpu"))
    monkeypatch.setattr(memset_nodes, "replace_memsets", as_kernels)
    graph, results = pool.capture(lambda: ("result",))
    assert results == ("result",)
    assert str(graph) in cuda.alive
    assert cuda.stream == "users"
    assert f"reset of {graph}" not in cuda.log
    assert [line.split()[0] for line in cuda.log if "pool" not in line] == [
        "users",
        "users",
        "end",
        "users",
        "reset",
        "users",
    ]
