"""The plan of a segment of calls on lists: which results a kernel computes together, and the rows of its table.

Note: who may overwrite what
    A kernel reads and writes the same element of a row, so results may lie where their operands lay. What is no
    element of the row (a counter, a rate) must not change while a kernel runs: results without dimensions, which
    others read as numbers, have kernels of their own after all others. Every stored result is held against all
    that reads its place.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from wholestep.ir import node_meta, op_info
from wholestep.ir.ops.packed_scalars import element
from wholestep.ir.segment import Segment
from wholestep.lower.foreach import index_expr, triton_codegen
from wholestep.lower.foreach.index_expr import Item, Leaf, Line, Reading, dtype_of, first_list, root_of, takes
from wholestep.lower.foreach.triton_codegen import NotPointwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One address of a table, or a number in its place."""

    base: int
    """0: none; then the arguments of the segment, what is in `Plan.fresh`, what is in `Plan.turned`."""
    offset: int
    """Bytes after the start of the base; without one the number itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One launch."""

    text: str
    rows: tuple[tuple[Cell, ...], ...]
    """One per index: what it reads, what it writes, the number of its elements."""
    of_numbers: bool
    """Whether results have no dimensions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turned:
    """An operand whose elements lie in another order than those of the results: a copy of it is read."""

    argument: int
    seen: Tensor
    """A fake tensor: the view of the argument that is read."""
    start: int
    """Elements from the start of the argument to that of the view."""
    strides: tuple[int, ...]
    """Those of the copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a segment is computed."""

    kernels: tuple[Kernel, ...]
    """In the order of their launches."""
    fresh: tuple[tuple[int, Tensor], ...]
    """Results that are stored nowhere: their number, and a fake tensor with their layout."""
    turned: tuple[Turned, ...]
    num_results: int
    device: torch.device

    @property
    def num_rows(self) -> int:
        """How many tensors are updated, counters included."""
        return sum(len(kernel.rows) for kernel in self.kernels)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """Results of one index that have one shape and order, and what they are computed from."""

    results: tuple[int, ...]
    like: Tensor
    """One of the results."""
    leaves: tuple[fx.Node, ...]
    lines: tuple[Line, ...]
    given: tuple[Leaf | Item, ...]
    """The results, in order."""

    def is_whole(self, leaf: fx.Node) -> bool:
        """Whether a leaf is read element by element, and not as one number. Raises NotPointwise."""
        shape = torch.Size() if leaf.target is element else node_meta.tensor(leaf).shape
        if shape and shape != self.like.shape:
            raise NotPointwise(f"{leaf.name} has the shape {list(shape)} where results have {list(self.like.shape)}")
        return shape == self.like.shape

    @property
    def key(self) -> str:
        """The same for units that one kernel computes."""
        leaves = [(dtype_of(leaf), self.is_whole(leaf)) for leaf in self.leaves]
        return repr((self.like.ndim > 0, self.lines, self.given, leaves))

    def text(self) -> str:
        """The kernel that computes the unit. Raises NotPointwise."""
        whole = [self.is_whole(leaf) for leaf in self.leaves]
        with FakeTensorMode(), torch.no_grad():
            inputs = [
                torch.empty(self.like.shape if is_whole else (), dtype=dtype_of(leaf), device=self.like.device)
                for leaf, is_whole in zip(self.leaves, whole, strict=True)
            ]
            graph = make_fx(self._run)(*inputs).graph
        graph.eliminate_dead_code()
        name = "update_lists" if self.like.ndim else "update_numbers"
        return triton_codegen.kernel(name, graph, elementwise=whole)

    def _run(self, *leaves: Tensor) -> list[Tensor]:
        return index_expr.run(self.lines, leaves, self.given)


def plan(segment: Segment, texts: dict[str, str]) -> Plan | str:
    """The kernels that compute a segment, or why it is not computed here. `texts` are those of kernels, by expression;
    new ones are added."""
    other = next((node for node in segment.calls if not _is_of_lists(node)), None)
    if other is not None:
        return f"{other.name} is no call on lists of a GPU"
    try:
        return _Planner(segment, texts).plan()
    except NotPointwise as error:
        return str(error)


def _is_of_lists(node: fx.Node) -> bool:
    return node.target is operator.getitem or op_info.is_view(node) or takes(node)


class _Planner:
    def __init__(self, segment: Segment, texts: dict[str, str]) -> None:
        self._texts = texts
        self._arguments = segment.graph.find_nodes(op="placeholder")
        self._places = {argument: place for place, argument in enumerate(self._arguments)}
        self._results: Sequence[fx.Node] = segment.graph.output_node().args[0]  # type: ignore[assignment]
        self._stored = {result: argument for argument, result in segment.stored}
        self._fresh = [number for number in range(len(self._results)) if number not in self._stored]
        self._starts, self._seen = _views(segment)
        self._turned: dict[tuple[fx.Node, tuple[int, ...]], Turned] = {}

    def plan(self) -> Plan:
        """Raises NotPointwise."""
        groups: dict[str, list[_Unit]] = {}
        for unit in self._units():
            groups.setdefault(unit.key, []).append(unit)
        ordered = sorted(groups.values(), key=lambda units: units[0].like.ndim == 0)
        self._check_order(ordered)
        for key, (unit, *_) in groups.items():
            if key not in self._texts:
                self._texts[key] = unit.text()
        return Plan(
            kernels=tuple(
                Kernel(
                    text=self._texts[units[0].key], rows=tuple(map(self._row, units)), of_numbers=not units[0].like.ndim
                )
                for units in ordered
            ),
            fresh=tuple((number, node_meta.tensor(self._results[number])) for number in self._fresh),
            turned=tuple(self._turned.values()),
            num_results=len(self._results),
            device=node_meta.tensor(self._results[0]).device,
        )

    def _units(self) -> Iterator[_Unit]:
        """Results that share a value of their own size and order are computed together, and so are those of which one
        is stored where another one reads: memory is read once, and nobody has to be first."""
        parents = list(range(len(self._results)))
        writers = {self._arguments[argument]: number for number, argument in self._stored.items()}
        owners: dict[Any, int] = {}

        def head(number: int) -> int:
            while parents[number] != number:
                number = parents[number]
            return number

        for number, result in enumerate(self._results):
            reading, like = Reading(), node_meta.tensor(result)
            reading.value(result)
            for call, index in reading.made:
                if first_list(call)[index].shape == like.shape:
                    owner = owners.setdefault((call, index, _order(like)), number)
                    parents[head(number)] = head(owner)
            for leaf in reading.leaves:
                writer = writers.get(leaf, number)
                written = node_meta.tensor(self._results[writer])
                if (written.shape, _order(written)) == (like.shape, _order(like)):
                    parents[head(number)] = head(writer)
        together: dict[int, list[int]] = {}
        for number in range(len(self._results)):
            together.setdefault(head(number), []).append(number)
        for results in together.values():
            reading = Reading()
            given = tuple(reading.value(self._results[number]) for number in results)
            like = node_meta.tensor(self._results[results[0]])
            if _order(like) is None:
                raise NotPointwise(f"{self._results[results[0]].name} leaves gaps in memory")
            yield _Unit(
                results=tuple(results), like=like, leaves=tuple(reading.leaves), lines=tuple(reading.lines), given=given
            )

    def _check_order(self, ordered: Sequence[Sequence[_Unit]]) -> None:
        """Raises NotPointwise where something is read that a kernel before has overwritten, or the same one might."""
        writers = {
            self._arguments[self._stored[number]]: (place, unit)
            for place, units in enumerate(ordered) for unit in units
            for number in unit.results if number in self._stored
        }  # fmt: skip
        for place, units in enumerate(ordered):
            for unit in units:
                for leaf in unit.leaves:
                    when, writer = writers.get(root_of(leaf), (len(ordered), None))
                    itself = writer is unit and leaf is root_of(leaf) and unit.is_whole(leaf)
                    if when <= place and not itself:
                        raise NotPointwise(f"{leaf.name} is read for one index and overwritten by another")

    def _row(self, unit: _Unit) -> tuple[Cell, ...]:
        read = [self._read(leaf, unit) for leaf in unit.leaves]
        written = [self._written(number) for number in unit.results]
        return (*read, *written, Cell(base=0, offset=unit.like.numel()))

    def _read(self, leaf: fx.Node, unit: _Unit) -> Cell:
        root = root_of(leaf)
        argument = self._places[root]
        if leaf.target is element:
            return Cell(base=1 + argument, offset=int(leaf.args[1]) * torch.float64.itemsize)  # type: ignore[arg-type]
        seen, start = self._seen[leaf], self._starts[leaf]
        if seen.dtype is not node_meta.tensor(root).dtype:
            raise NotPointwise(f"{leaf.name} is {root.name} seen in another type")
        if not unit.is_whole(leaf) or _order(seen) == _order(unit.like):
            return Cell(base=1 + argument, offset=start * seen.dtype.itemsize)
        strides = unit.like.stride()
        key = (leaf, strides)
        self._turned.setdefault(key, Turned(argument=argument, seen=seen, start=start, strides=strides))
        return Cell(base=1 + len(self._arguments) + len(self._fresh) + list(self._turned).index(key), offset=0)

    def _written(self, number: int) -> Cell:
        if number in self._stored:
            return Cell(base=1 + self._stored[number], offset=0)
        return Cell(base=1 + len(self._arguments) + self._fresh.index(number), offset=0)


def _order(tensor: Tensor) -> tuple[int, ...] | None:
    """In which order the elements fill the memory: tensors of one shape and order are the same range, element by
    element. None where they leave gaps or overlap."""
    if tensor.numel() == 0:
        return ()
    expected = 1
    strides = tensor.stride()
    for stride, size in sorted((stride, size) for stride, size in zip(strides, tensor.shape, strict=True) if size > 1):
        if stride != expected:
            return None
        expected *= size
    return tuple(stride if size > 1 else 0 for stride, size in zip(strides, tensor.shape, strict=True))


def _views(segment: Segment) -> tuple[dict[fx.Node, int], dict[fx.Node, Tensor]]:
    """For every argument and view of one: elements from the start of the argument, and a fake tensor as it is seen.

    Views are made again: what a node says of its value may have been written down before the memory was a bucket's.
    """
    starts: dict[fx.Node, int] = {}
    seen: dict[fx.Node, Any] = {}
    with torch.no_grad():
        for node in segment.graph.nodes:
            if node.op == "placeholder":
                seen[node] = node_meta.value(node)
            elif op_info.is_view(node) and node.target is not element and root_of(node).op == "placeholder":
                args, kwargs = fx.map_arg((node.args, node.kwargs), seen.__getitem__)
                seen[node] = node.target(*args, **kwargs)
            if isinstance(seen.get(node), Tensor):
                starts[node] = seen[node].storage_offset() - node_meta.tensor(root_of(node)).storage_offset()
    return starts, seen
