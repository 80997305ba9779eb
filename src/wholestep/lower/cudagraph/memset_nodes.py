"""Memsets of a captured CUDA graph as kernels: the only file that edits captured graphs.

Libraries zero their workspaces by ``cudaMemsetAsync``: attention its accumulators and counters, products theirs.
Between kernels of a graph such a node costs 10 us, as the kernels before and after wait; a kernel that fills as much
takes 2. So before a graph is instantiated, torch's own kernel that fills stands in the place of each memset::

    product -> memset -> attention          product -> fill -> attention

Source: the gap that a memset leaves in a graph was described by the authors of TensorRT-LLM (pull request 4851, 2025).
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

log = logging.getLogger("wholestep")

Capture = Callable[[Callable[[], object]], torch.cuda.CUDAGraph]
"""Captures what a function gives the device, as a graph of which the nodes can be read."""

_FILLED_AS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""By the bytes of an element."""
_WIDE_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Memset:
    """What a memset writes."""

    address: int
    value: int
    """Of an element, without a sign."""
    element_bytes: int
    count: int
    """Elements."""

    def fill(self, device: torch.device) -> None:
        """Does the same with a kernel of torch."""
        num_bytes = self.count * self.element_bytes
        dtype, value = _FILLED_AS[self.element_bytes], self.value
        if value == 0 and self.address % _WIDE_BYTES == num_bytes % _WIDE_BYTES == 0:
            dtype = torch.int64
        elif dtype is not torch.uint8 and value >= 1 << (8 * self.element_bytes - 1):
            value -= 1 << (8 * self.element_bytes)
        storage = torch._C._construct_storage_from_data_pointer(self.address, device, num_bytes)
        flat = torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (num_bytes // dtype.itemsize,), (1,))
        flat.fill_(value)


class Graph:
    """Nodes of a captured graph, by the bindings of the driver, which raise RuntimeError for what it refuses."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._driver = importlib.import_module("cuda.bindings.driver")
        self._graph = self._driver.CUgraph(graph.raw_cuda_graph())
        self._old = self._driver.CUDA_VERSION < 13_000
        """Whether functions do not know of data of edges."""

    def nodes(self) -> list[Any]:
        """All nodes."""
        return self._listed(self._driver.cuGraphGetNodes, self._graph)

    def kind(self, node: Any) -> str:
        """Of a node: "KERNEL", "MEMSET", "MEM_ALLOC" and the like."""
        (kind,) = self._asked(self._driver.cuGraphNodeGetType, node)
        return str(kind.name).removeprefix("CU_GRAPH_NODE_TYPE_")

    def memset(self, node: Any) -> Memset | None:
        """What a memset writes; None if that is no single run of elements."""
        (found,) = self._asked(self._driver.cuGraphMemsetNodeGetParams, node)
        if int(found.height) != 1 or int(found.elementSize) not in _FILLED_AS:
            return None
        return Memset(
            address=int(found.dst), value=int(found.value), element_bytes=int(found.elementSize), count=int(found.width)
        )

    def kernel(self, node: Any) -> Any:
        """What a kernel is launched with. Valid as long as its graph lives."""
        (found,) = self._asked(self._driver.cuGraphKernelNodeGetParams, node)
        return found

    def predecessors(self, node: Any) -> list[Any]:
        """The nodes that a node waits for. Raises if it does so in another way than by their end."""
        return self._listed(self._driver.cuGraphNodeGetDependencies, node)

    def successors(self, node: Any) -> list[Any]:
        """The nodes that wait for a node, likewise."""
        return self._listed(self._driver.cuGraphNodeGetDependentNodes, node)

    def add_kernel(self, launch: Any, dependencies: Sequence[Any]) -> Any:
        """A new node that launches a kernel after its `dependencies`."""
        (node,) = self._asked(
            self._driver.cuGraphAddKernelNode, self._graph, list(dependencies), len(dependencies), launch
        )
        return node

    def add_edges(self, node: Any, successors: Sequence[Any]) -> None:
        """Has nodes wait for a node."""
        pairs = ([node] * len(successors), list(successors), *(() if self._old else (None,)), len(successors))
        self._asked(self._driver.cuGraphAddDependencies, self._graph, *pairs)

    def remove(self, node: Any) -> None:
        """Takes a node and its edges out."""
        self._asked(self._driver.cuGraphDestroyNode, node)

    def _listed(self, function: Any, thing: Any) -> list[Any]:
        count = self._asked(function, thing)[-1]
        return list(self._asked(function, thing, count)[0]) if count else []

    def _asked(self, function: Any, *args: Any) -> tuple[Any, ...]:
        error, *found = function(*args)
        if int(error) != 0:
            raise RuntimeError(f"{function.__name__}: {error.name}")
        return tuple(found)


def replace_memsets(captured: torch.cuda.CUDAGraph, capture: Capture, device: torch.device) -> int:
    """Puts a kernel in the place of every memset that one can stand for, in a graph that is not instantiated yet.

    Args:
        captured: the graph, made with ``keep_graph=True``.
        capture: captures the kernels that fill, as a graph of its own.
        device: of both.

    Gives how many were replaced. What the graph does is the same where something is refused in between, which is told
    in the log.
    """
    replaced = 0
    try:
        graph = Graph(captured)
        kinds = {node: graph.kind(node) for node in graph.nodes()}
        if not {"MEM_ALLOC", "MEM_FREE"}.isdisjoint(kinds.values()):
            return 0  # nothing can be taken out of such a graph
        known = {node: graph.memset(node) for node, kind in kinds.items() if kind == "MEMSET"}
        memsets = {node: one for node, one in known.items() if one is not None and one.count}
        if not memsets:
            return 0

        def fill() -> None:
            for one in memsets.values():
                one.fill(device)

        owner = capture(fill)  # of what is launched, until it is copied
        for node, launch in zip(memsets, _launches(Graph(owner), len(memsets)), strict=True):
            _replace(graph, node, launch)
            replaced += 1
    except Exception as error:  # a driver or bindings of another kind: the graph is right as it is
        log.info("memsets of a CUDA graph stay, but for %d: %s: %s", replaced, type(error).__name__, error)
    return replaced


def _launches(fills: Graph, count: int) -> list[Any]:
    """What the kernels of a captured sequence are launched with, in order."""
    chain = [node for node in fills.nodes() if not fills.predecessors(node)]
    while chain and (successors := fills.successors(chain[-1])):
        chain += successors
    kinds = [fills.kind(node) for node in chain]
    if kinds != ["KERNEL"] * count:
        raise RuntimeError(f"{count} fills were captured as {', '.join(kinds)}")
    return [fills.kernel(node) for node in chain]


def _replace(graph: Graph, node: Any, launch: Any) -> None:
    before, successors = graph.predecessors(node), graph.successors(node)
    kernel = graph.add_kernel(launch, before)
    try:
        if successors:
            graph.add_edges(kernel, successors)
    except Exception:
        graph.remove(kernel)  # nobody waits for it yet
        raise
    graph.remove(node)
