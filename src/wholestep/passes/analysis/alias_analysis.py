"""Who shares memory with whom, and until when a value is read. Asked by `reinplace`.

Note: the model
    Every value of a graph carries a fake tensor, and views share the storage of what they view, so the
    storage of the fake tensor names the memory. One correction makes that true of what really runs: where
    a view is known whose fake tensor has a storage of its own (a wait gives back the tensor of its
    collective), the two storages are merged into one block of memory.
    Two values overlap if they live in the same block, unless both are spans of the same storage that do
    not meet. Time is the position in the graph; what the step returns or writes is read at FOREVER.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from wholestep.ir import graph_edit, node_meta, op_info
from wholestep.ir.ops.collectives import ALL_REDUCE_BY_COPIES, ALL_REDUCE_ROWS, REDUCE
from wholestep.ir.sizes import are_same

FOREVER = 1 << 60

# These copy what they are given before they return; other collectives read their input until the wait.
COPY_FIRST = frozenset({
    op_info.c10d.all_reduce.default, op_info.c10d.all_reduce_coalesced.default, op_info.c10d.broadcast.default, REDUCE,
    ALL_REDUCE_BY_COPIES, ALL_REDUCE_ROWS,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Span:
    """A tensor's place in its storage: bytes from `start` up to `stop`."""

    storage: int
    start: int
    stop: int


@dataclass(slots=True)
class Block:
    """Memory of one or more storages: the values in it, and the graph inputs among them."""

    values: list[fx.Node] = field(default_factory=list)
    inputs: list[fx.Node] = field(default_factory=list)
    constant: bool = False


class Memory:
    """The memory of a graph's values, while a pass walks over the graph in order.

    `enter` each node, then ask about it.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.position = graph_edit.positions(graph)
        self.last_read = {node: self._last_read(node) for node in graph.nodes}
        self._parent: dict[int, int] = {}
        self._blocks: dict[int, Block] = {}
        self._relocated: set[fx.Node] = set()

    def enter(self, node: fx.Node) -> None:
        """Takes note of the memory that the node's value lives in."""
        if node.op == "call_function":
            self._follow(node)
        for storage in {storage_of(one) for one in node_meta.tensors(node)}:
            block = self._blocks.setdefault(self._root(storage), Block())
            block.values.append(node)
            if node.op == "placeholder":
                block.inputs.append(node)
            block.constant |= node.op == "get_attr"

    def insert(self, new: fx.Node, *, at: fx.Node, onto: fx.Node | Sequence[fx.Node] | None = None) -> None:
        """Gives `new` the place and the readers of `at`.

        It lives in the memory of `onto`, or in its own.
        """
        self.position[new], self.last_read[new] = self.position[at], self.last_read[at]
        if onto is not None:
            node_meta.set_value(
                new, node_meta.value(onto) if isinstance(onto, fx.Node) else list(map(node_meta.value, onto))
            )
            self._relocated.add(new)
        self.enter(new)

    def extend(self, node: fx.Node, until: int) -> None:
        """The value of `node` is read until `until` at least."""
        self.last_read[node] = max(self.last_read[node], until)

    def block(self, node: fx.Node) -> Block:
        """The memory of a node that gives one tensor."""
        return self._blocks[self._root(storage_of(node_meta.tensor(node)))]

    def storage(self, tensor: torch.Tensor) -> int:
        """The name of the memory that a value which was entered lives in."""
        return self._root(storage_of(tensor))

    def storages(self, node: fx.Node) -> tuple[int, ...]:
        """The same for each tensor that the node gives."""
        return tuple(map(self.storage, node_meta.tensors(node)))

    def overlap(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Whether two values may share a byte."""
        one, other = span_of(a), span_of(b)
        if one.storage != other.storage:
            return self._root(one.storage) == self._root(other.storage)
        return one.start < other.stop and other.start < one.stop

    def read_later(self, node: fx.Node, position: int) -> fx.Node | None:
        """A value that overlaps with the node's and is read after `position`; None if none is."""
        tensor = node_meta.tensor(node)
        for value in self.block(node).values:
            if self.last_read[value] > position and any(self.overlap(one, tensor) for one in node_meta.tensors(value)):
                return value
        return None

    def _follow(self, node: fx.Node) -> None:
        """Brings the value of a view into the memory of what it views."""
        viewed = list(
            graph_edit.nodes_of([node.args[i] for i in op_info.viewed_args(node.target) if i < len(node.args)])
        )
        if not viewed:
            return
        if any(arg in self._relocated for arg in viewed):
            # A fake wait gives a tensor of its own; a real one gives what it waited for.
            if node.target is op_info.WAIT:
                node_meta.set_value(node, node_meta.value(viewed[0]))
            else:
                graph_edit.evaluate(node)
            self._relocated.add(node)
        if node.target is operator.getitem:
            return
        for arg in viewed:
            for one in node_meta.tensors(node):
                for base in node_meta.tensors(arg):
                    self._merge(storage_of(one), storage_of(base))

    def _last_read(self, node: fx.Node) -> int:
        last = self._delivered(node)
        for user in node.users:
            if user.op == "output":
                return FOREVER
            if user.target in (op_info.VERSION, op_info.SET_VERSION):  # a counter is no memory
                continue
            # Taking an element out of a list reads no memory.
            if user.target is operator.getitem and not isinstance(node_meta.value(node), torch.Tensor):
                continue
            last = max(last, self._reads_until(user))
        return last

    def _delivered(self, node: fx.Node) -> int:
        """For one result of a call that sends several: when all of them have been waited for.

        Gloo brings all results of a call again at every wait for one of them.
        """
        if node.target is not operator.getitem or not op_info.is_collective(node.args[0]):  # type: ignore[arg-type]
            return -1
        return max((self.position[wait] for wait in op_info.waits(node.args[0])), default=-1)  # type: ignore[arg-type]

    def _reads_until(self, user: fx.Node) -> int:
        if op_info.is_collective(user) and user.target not in COPY_FIRST:
            items = (one for one in user.users if one.target is operator.getitem)
            if any(one.op == "output" for item in (user, *items) for one in item.users):
                return FOREVER  # the caller waits
            return max([self.position[user], *(self.position[wait] for wait in op_info.waits(user))])
        return self.position[user]

    def _root(self, storage: int) -> int:
        while (parent := self._parent.get(storage, storage)) != storage:
            storage = parent
        return storage

    def _merge(self, a: int, b: int) -> None:
        one, other = self._root(a), self._root(b)
        if one == other:
            return
        self._parent[one] = other
        old, block = self._blocks.pop(one, Block()), self._blocks.setdefault(other, Block())
        block.values += old.values
        block.inputs += old.inputs
        block.constant |= old.constant


def storage_of(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage."""
    # A tensor without strides (sparse) has its own.
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else -id(tensor)


def span_of(tensor: torch.Tensor) -> Span:
    """The bytes of its storage that a tensor takes.

    A tensor without strides (sparse) or of unknown size fills its storage.
    """
    storage = storage_of(tensor)
    if tensor.layout is not torch.strided:
        return Span(storage, 0, FOREVER)
    item, start = tensor.element_size(), tensor.storage_offset()
    if not all(isinstance(number, int) for number in (*tensor.shape, *tensor.stride(), start)):
        return Span(storage, 0, FOREVER)
    start = int(start)
    if tensor.numel() == 0:
        return Span(storage, start * item, start * item)
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return Span(storage, start * item, (start + reach + 1) * item)


def same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether one can stand in for the other: shape, strides, type, device."""
    return (
        a.layout is b.layout is torch.strided
        and are_same(a.shape, b.shape)
        and are_same(a.stride(), b.stride())
        and a.dtype == b.dtype
        and a.device == b.device
        and a.is_conj() == b.is_conj()
        and a.is_neg() == b.is_neg()
    )


def same_place(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether both are the same bytes seen in the same way."""
    return same_layout(a, b) and span_of(a) == span_of(b)


def tensor_nodes(tree: Any) -> Iterator[fx.Node]:
    """Every node inside a nest of arguments whose value is one tensor."""
    nodes = (tree,) if isinstance(tree, fx.Node) else graph_edit.nodes_of(tree)
    return (node for node in nodes if isinstance(node_meta.value(node), torch.Tensor))
