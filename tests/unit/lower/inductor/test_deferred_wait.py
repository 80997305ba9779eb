"""Inductor's waits, put off until all graphs are written: in which order things happen, and that nothing is lost.

On a GPU, where kernels have binaries and bundles, `test_moved.py` and tests/gpu compile this way.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import FxGraphCache, PyCodeCache
from torch._inductor.triton_bundler import TritonBundler
from torch._inductor.utils import fresh_cache

from tests.unit import builders
from wholestep.ir.segment import Segment
from wholestep.lower.inductor import deferred_wait, segment_compiler
from wholestep.passes.pass_manager import run_passes
from wholestep.passes.schedule.form_segments import form_segments

BEFORE = {"wait": AsyncCompile.wait, "_save_graph": vars(FxGraphCache)["_save_graph"]}


@pytest.fixture(autouse=True)
def torch_is_as_it_was() -> Iterator[None]:
    yield
    assert AsyncCompile.wait is BEFORE["wait"]
    assert vars(FxGraphCache)["_save_graph"] is BEFORE["_save_graph"]


def segment_of(number: int) -> Segment:
    """One that no other number gives."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        return (x * (number + 2)).sin() + y

    program = builders.capture(step, [torch.zeros(4, 8), torch.zeros(4, 8)])
    program = run_passes(program, [lambda one: form_segments(one, compiles=segment_compiler.compiles)])
    (found,) = (node.target for node in program.graph.nodes if isinstance(node.target, Segment))
    return found


def check(compiled: segment_compiler.Compiled, number: int) -> None:
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    (found,) = compiled([x, y])
    torch.testing.assert_close(found, (x * (number + 2)).sin() + y)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What Inductor does, in order."""
    happened: list[str] = []
    wait, load, write = AsyncCompile.wait, PyCodeCache.load_by_key_path, FxGraphCache._save_graph

    def noted(name: str, work: Any) -> Any:
        return lambda *args, **kwargs: (happened.append(name), work(*args, **kwargs))[1]

    monkeypatch.setattr(AsyncCompile, "wait", noted("wait", wait))
    monkeypatch.setattr(PyCodeCache, "load_by_key_path", noted("load", load))
    monkeypatch.setattr(FxGraphCache, "_save_graph", staticmethod(noted("save", write)))
    monkeypatch.setitem(BEFORE, "wait", AsyncCompile.wait)
    monkeypatch.setitem(BEFORE, "_save_graph", vars(FxGraphCache)["_save_graph"])
    return happened


def test_all_are_written_before_one_is_waited_for(log: list[str]) -> None:
    """And are in Inductor's cache after it."""
    segments = [segment_of(number) for number in range(3)]
    with fresh_cache():
        first = segment_compiler.SegmentCompiler(torch.device("cpu"))
        for one in segments:
            first.begin(one)
        # Modules of kernels in C++ are loaded by that name, too, when they are waited for.
        assert set(log) == {"load"}
        written = len(log)
        first.finish()
        rest = [one for one in log[written:] if one != "load"]
        assert rest == ["wait", "save"] * 3
        for number, one in enumerate(segments):
            check(first.compile(one), number)
        assert log.count("wait") == 3, "what is compiled is not waited for again"
        counters.clear()
        second = segment_compiler.SegmentCompiler(torch.device("cpu"))
        for number, one in enumerate(segments):
            check(second.compile(one), number)
        assert counters["inductor"]["fxgraph_cache_hit"] == 3
        assert log.count("save") == 3


def test_what_fails_was_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is what would have been waited for after it; what was finished stays."""
    segments = [segment_of(number) for number in range(3)]
    wait, calls = AsyncCompile.wait, list[int]()

    def fails_second(workers: AsyncCompile, scope: dict[str, Any]) -> None:
        calls.append(len(calls))
        if len(calls) == 2:
            raise RuntimeError("no such instruction")
        wait(workers, scope)

    with fresh_cache(), monkeypatch.context() as patched:
        patched.setattr(AsyncCompile, "wait", fails_second)
        compiler = segment_compiler.SegmentCompiler(torch.device("cpu"))
        for one in segments:
            compiler.begin(one)
        with pytest.raises(RuntimeError, match="no such instruction"):
            compiler.finish()
        assert list(compiler._compiled) == [segments[0].likeness]
        assert compiler._unfinished == {}
        for number, one in enumerate(segments):
            check(compiler.compile(one), number)
        assert len(calls) == 4
        assert TritonBundler._entries is None


def named(kernel: str) -> Any:
    return SimpleNamespace(kernel_name=kernel)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is waited for and written, by stand-ins. A scope names kernels, whose binaries are there after the wait."""
    happened: list[tuple[Any, ...]] = []

    def wait(workers: Any, scope: dict[str, Any]) -> None:
        happened.append(("wait", *scope))
        if TritonBundler._static_autotuners is not None:
            TritonBundler._static_autotuners.extend(map(named, scope))

    def save(key: str, graph: Any, *rest: Any) -> None:
        happened.append(("save", key, *rest, *(one.kernel_name for one in graph._triton_bundle.static_autotuners)))

    monkeypatch.setattr(AsyncCompile, "wait", wait)
    monkeypatch.setattr(FxGraphCache, "_save_graph", staticmethod(save))
    monkeypatch.setitem(BEFORE, "wait", wait)
    monkeypatch.setitem(BEFORE, "_save_graph", vars(FxGraphCache)["_save_graph"])
    return happened


def graph_with(*early: str) -> Any:
    """A compiled graph, with these kernels in its bundle."""
    TritonBundler.begin_compile()
    assert TritonBundler._static_autotuners is not None
    TritonBundler._static_autotuners.extend(map(named, early))
    bundle, _ = TritonBundler.collect()
    graph = SimpleNamespace(_triton_bundle=bundle)
    graph.set_triton_bundle = lambda held: setattr(graph, "_triton_bundle", held)
    return graph


def test_bundles_hold_all_kernels(stand_ins: list[tuple[Any, ...]]) -> None:
    """Those that were there at once, until the workers were up, and those that were waited for."""
    graph = graph_with("early")
    with deferred_wait.defer_waits() as rest:
        AsyncCompile().wait({"late": 1, "later": 2})
        FxGraphCache._save_graph("key", graph, [], True, None)
    assert stand_ins == []
    rest()
    assert stand_ins == [("wait", "late", "later"), ("save", "key", [], True, None, "early", "late", "later")]
    assert TritonBundler._static_autotuners is None


def test_what_is_not_written_has_no_bundle(stand_ins: list[tuple[Any, ...]]) -> None:
    """A graph that was found in the cache, or one of a torch that keeps none."""
    with deferred_wait.defer_waits() as rest:
        AsyncCompile().wait({"found": 1})
    rest()
    assert stand_ins == [("wait", "found")]


def test_other_threads_wait_as_they_do(stand_ins: list[tuple[Any, ...]]) -> None:
    def work() -> None:
        AsyncCompile().wait({"theirs": 1})
        FxGraphCache._save_graph("their key", graph_with("their own"), [])

    with deferred_wait.defer_waits() as rest:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        AsyncCompile().wait({"ours": 1})
    assert stand_ins == [("wait", "theirs"), ("save", "their key", [], "their own")]
    rest()
    assert stand_ins[2:] == [("wait", "ours")]


def test_a_torch_of_another_form_waits_at_once(
    stand_ins: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferred_wait, "_KNOWN", False)
    with deferred_wait.defer_waits() as rest:
        AsyncCompile().wait({"one": 1})
    assert stand_ins == [("wait", "one")]
    rest()
    assert stand_ins == [("wait", "one")]


def test_these_versions_are_known() -> None:
    assert deferred_wait._KNOWN
