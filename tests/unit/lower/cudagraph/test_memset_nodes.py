"""Memsets of captured graphs as kernels, on graphs of a driver that is made up here."""

from __future__ import annotations

import enum
import itertools
import logging
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from wholestep.lower.cudagraph import memset_nodes
from wholestep.lower.cudagraph.memset_nodes import Memset, replace_memsets

CPU = torch.device("cpu")


class Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NOT_SUPPORTED = 801


class Kind(enum.IntEnum):
    CU_GRAPH_NODE_TYPE_KERNEL = 0
    CU_GRAPH_NODE_TYPE_MEMSET = 2
    CU_GRAPH_NODE_TYPE_MEM_ALLOC = 10


class Captured:
    """A graph of nodes: what is known of each, and who waits for whom."""

    numbers = itertools.count(1)
    by_number: ClassVar[dict[int, Captured]] = {}

    def __init__(self) -> None:
        self.nodes: dict[int, Any] = {}
        self.edges: set[tuple[int, int]] = set()
        self.number = next(self.numbers)
        self.by_number[self.number] = self

    def raw_cuda_graph(self) -> int:
        return self.number

    def add(self, what: Any, *before: int) -> int:
        node = next(self.numbers)
        self.nodes[node] = what
        self.edges |= {(one, node) for one in before}
        return node

    def told(self) -> set[tuple[Any, Any]]:
        """Edges, by what the nodes do."""
        return {(self.nodes[one], self.nodes[other]) for one, other in self.edges}


class Driver(ModuleType):
    """As bindings of version 13 behave; `refuses` are functions that fail from their nth call on."""

    CUDA_VERSION = 13_000

    def __init__(self) -> None:
        super().__init__("cuda.bindings.driver")
        self.refuses: dict[str, int] = {}
        self.CUgraph = Captured.by_number.__getitem__
        for name in dir(Driver):
            if name.startswith("cuGraph"):
                setattr(self, name, self._counted(name, getattr(self, name)))

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> tuple[Any, ...]:
            self.refuses[name] = self.refuses.get(name, 1 << 30) - 1
            if self.refuses[name] < 0:
                return Result.CUDA_ERROR_NOT_SUPPORTED, None
            return Result.CUDA_SUCCESS, *function(*args)

        run.__name__ = name
        return run

    def _of(self, node: int) -> Captured:
        return next(one for one in Captured.by_number.values() if node in one.nodes)

    def cuGraphGetNodes(self, graph: Captured, count: int = 0) -> tuple[Any, ...]:
        return list(graph.nodes)[:count], len(graph.nodes)

    def cuGraphNodeGetType(self, node: int) -> tuple[Any, ...]:
        what = self._of(node).nodes[node]
        if what == "alloc":
            return (Kind.CU_GRAPH_NODE_TYPE_MEM_ALLOC,)
        return (
            Kind.CU_GRAPH_NODE_TYPE_MEMSET if isinstance(what, SimpleNamespace) else Kind.CU_GRAPH_NODE_TYPE_KERNEL,
        )

    def cuGraphMemsetNodeGetParams(self, node: int) -> tuple[Any, ...]:
        return (self._of(node).nodes[node],)

    def cuGraphKernelNodeGetParams(self, node: int) -> tuple[Any, ...]:
        return (self._of(node).nodes[node],)

    def _listed(self, found: list[int], count: int) -> tuple[Any, ...]:
        edges = () if self.CUDA_VERSION < 13_000 else ([None] * count,)
        return found[:count], *edges, len(found)

    def cuGraphNodeGetDependencies(self, node: int, count: int = 0) -> tuple[Any, ...]:
        return self._listed([one for one, other in sorted(self._of(node).edges) if other == node], count)

    def cuGraphNodeGetDependentNodes(self, node: int, count: int = 0) -> tuple[Any, ...]:
        return self._listed([other for one, other in sorted(self._of(node).edges) if one == node], count)

    def cuGraphAddKernelNode(self, graph: Captured, before: list[int], count: int, launch: Any) -> tuple[Any, ...]:
        assert len(before) == count
        return (graph.add(launch, *before),)

    def cuGraphAddDependencies(self, graph: Captured, ones: Any, others: Any, *rest: Any) -> tuple[Any, ...]:
        assert rest == ((len(ones),) if self.CUDA_VERSION < 13_000 else (None, len(ones)))
        graph.edges |= set(zip(ones, others, strict=True))
        return ()

    def cuGraphDestroyNode(self, node: int) -> tuple[Any, ...]:
        graph = self._of(node)
        del graph.nodes[node]
        graph.edges = {edge for edge in graph.edges if node not in edge}
        return ()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", made)
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    return made


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> list[Memset]:
    """What was filled, in order."""
    done: list[Memset] = []
    monkeypatch.setattr(Memset, "fill", lambda self, device: done.append(self))
    return done


def capture_of(filled: list[Memset]) -> Callable[[Callable[[], object]], Any]:
    """A capture that finds a kernel for each fill, named by its address."""

    def capture(body: Callable[[], object]) -> Captured:
        graph, node = Captured(), ()
        body()
        for one in filled:
            node = (graph.add(f"fill {one.address}", *node),)
        return graph

    return capture


def memset(address: int, **other: Any) -> SimpleNamespace:
    return Params(dst=address, value=0, elementSize=1, width=8, height=1, pitch=0, **other)


class Params(SimpleNamespace):
    """Of a memset node; may stand in sets."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def step_of(*extra: Any) -> tuple[Captured, Any, Any]:
    """product -> memset -> attention, which waits for another kernel, too; and a memset that nobody waits for."""
    graph, first, second = Captured(), memset(100), memset(200)
    product, other = graph.add("product"), graph.add("other")
    zeros = graph.add(first, product, other)
    attention = graph.add("attention", zeros)
    graph.add("sum", zeros, attention)
    graph.add(second, attention)
    for one in extra:
        graph.add(one, attention)
    return graph, first, second


def edges(first: Any, second: Any) -> set[tuple[Any, Any]]:
    return {
        ("product", first), ("other", first), (first, "attention"), (first, "sum"), ("attention", "sum"),
        ("attention", second),
    }  # fmt: skip


@pytest.mark.parametrize("version", [12_090, 13_000])
def test_a_kernel_waits_and_is_waited_for_as_the_memset_was(driver: Driver, filled: list[Memset], version: int) -> None:
    driver.CUDA_VERSION = version
    graph, first, second = step_of()
    assert graph.told() == edges(first, second)
    assert replace_memsets(graph, capture_of(filled), CPU) == 2
    assert graph.told() == edges("fill 100", "fill 200")
    assert sorted(graph.nodes.values()) == ["attention", "fill 100", "fill 200", "other", "product", "sum"]
    assert filled[0] == Memset(address=100, value=0, element_bytes=1, count=8)


def test_memsets_that_are_no_single_run_stay(driver: Driver, filled: list[Memset]) -> None:
    rows, empty = memset(300), memset(400)
    rows.height, empty.width = 2, 0
    graph, *_ = step_of(rows, empty)
    assert replace_memsets(graph, capture_of(filled), CPU) == 2
    assert {rows, empty} <= set(graph.nodes.values())
    assert [one.address for one in filled] == [100, 200]


def test_a_graph_that_allocates_or_has_no_memsets_is_left(driver: Driver, filled: list[Memset]) -> None:
    graph, first, second = step_of("alloc")
    assert replace_memsets(graph, capture_of(filled), CPU) == 0
    assert graph.told() == {*edges(first, second), ("attention", "alloc")}
    plain = Captured()
    plain.add("product")
    assert replace_memsets(plain, None, CPU) == 0  # type: ignore[arg-type]
    assert filled == []


@pytest.mark.parametrize(
    ("refused", "wanted"),
    [
        ({"cuGraphNodeGetType": 0}, 0), ({"cuGraphMemsetNodeGetParams": 1}, 0), ({"cuGraphKernelNodeGetParams": 1}, 0),
        ({"cuGraphAddKernelNode": 0}, 0), ({"cuGraphAddKernelNode": 1}, 1), ({"cuGraphAddDependencies": 0}, 0),
    ],
)  # fmt: skip
def test_a_graph_does_the_same_where_the_driver_refuses(
    driver: Driver, filled: list[Memset], refused: dict[str, int], wanted: int, caplog: pytest.LogCaptureFixture
) -> None:
    graph, first, second = step_of()
    driver.refuses.update(refused)
    with caplog.at_level(logging.INFO, "wholestep"):
        assert replace_memsets(graph, capture_of(filled), CPU) == wanted
    assert graph.told() == (edges("fill 100", second) if wanted else edges(first, second))
    assert len(graph.nodes) == 6
    (name,) = refused
    assert f"memsets of a CUDA graph stay, but for {wanted}: RuntimeError: {name}: CUDA_ERROR" in caplog.text


def test_a_memset_that_cannot_go_is_done_twice_and_waited_for(driver: Driver, filled: list[Memset]) -> None:
    graph, first, second = step_of()
    driver.refuses["cuGraphDestroyNode"] = 0
    assert replace_memsets(graph, capture_of(filled), CPU) == 0
    own = {("product", "fill 100"), ("other", "fill 100"), ("fill 100", "attention"), ("fill 100", "sum")}
    assert graph.told() == edges(first, second) | own


def test_fills_that_are_no_kernels_are_not_taken(
    driver: Driver, filled: list[Memset], caplog: pytest.LogCaptureFixture
) -> None:
    def capture(body: Callable[[], object]) -> Captured:
        found = Captured()
        found.add(memset(100), found.add("fill"))
        return found

    graph, first, second = step_of()
    with caplog.at_level(logging.INFO, "wholestep"):
        assert replace_memsets(graph, capture, CPU) == 0
    assert graph.told() == edges(first, second)
    assert "2 fills were captured as KERNEL, MEMSET" in caplog.text


def test_without_bindings_memsets_stay(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with caplog.at_level(logging.INFO, "wholestep"):
        assert replace_memsets(Captured(), None, CPU) == 0  # type: ignore[arg-type]
    assert "memsets of a CUDA graph stay" in caplog.text


VALUES = {1: (0, 0xAB), 2: (0, 0xFEDC, 0x1234), 4: (0, 0xFEDCBA98, 7)}


@pytest.mark.parametrize(
    ("value", "element_bytes", "shift"),
    [
        (value, size, shift)
        for size, values in VALUES.items()
        for value in values
        for shift in (0, 1, 2, 4)
        if shift % size == 0  # a memset starts on a multiple of its elements
    ],
)
@pytest.mark.parametrize("count", [8, 9])
def test_a_fill_writes_what_the_memset_would(value: int, element_bytes: int, count: int, shift: int) -> None:
    memory = torch.full((64,), 7, dtype=torch.uint8)
    wanted = memory.clone()
    wanted[8 + shift : 8 + shift + count * element_bytes] = torch.tensor(
        list(value.to_bytes(element_bytes, "little") * count), dtype=torch.uint8
    )
    one = Memset(address=memory.data_ptr() + 8 + shift, value=value, element_bytes=element_bytes, count=count)
    one.fill(CPU)
    assert torch.equal(memory, wanted)
    assert memset_nodes._FILLED_AS[element_bytes].itemsize == element_bytes
