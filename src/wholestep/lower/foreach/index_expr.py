"""What one index of calls on lists of tensors computes: which calls, and the expression behind a result.

Of ``foreach_add([w0, w1], foreach_mul([g0, g1], rate))`` index 1 has the leaves g1, rate and w1, and the lines
``mul(g1, rate)`` and ``add(w1, mul)``. Equal lines on other leaves are the same kernel for other tensors.

An optimizer that goes through its parameters in a loop calls ``mul(g1, rate)`` itself. Its lines are the same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from wholestep.ir import node_meta, op_info
from wholestep.ir.node_meta import Region
from wholestep.ir.ops.packed_scalars import element
from wholestep.lower.decompositions import optimizers, tensor_scalars
from wholestep.lower.foreach import triton_codegen
from wholestep.lower.foreach.triton_codegen import NotPointwise

_OF_LOOPS = frozenset({*triton_codegen.TYPES, torch.bool})
"""What the calls of a loop may read and give."""


def takes(node: fx.Node) -> bool:
    """Whether a call may be computed here: element by element on a GPU, on lists or in the loop of an optimizer."""
    if not op_info.is_op(node) or not optimizers.on_gpu(node):
        return False
    if op_info.is_indexwise(node.target):
        if any(one.dtype not in triton_codegen.TYPES for one in node_meta.tensors(node)):
            return False
        return optimizers.is_written_out(node) or _has_text(node)
    return _is_of_loop(node) and _has_text(node) and _is_of_one_size(node)


def apart(graph: fx.Graph) -> set[fx.Node]:
    """The calls of a graph that are to be computed here: those on lists and those of loops."""
    return loops(graph).union(node for node in graph.nodes if op_info.is_indexwise(node.target) and takes(node))


def loops(graph: fx.Graph) -> set[fx.Node]:
    """The calls of loops that are to be computed here.

    None if something else of the optimizers is left for a compiler: it may be products by turns with them (Muon), and
    to take them out would leave it a piece for every parameter.
    """
    found = {node for node in graph.nodes if op_info.is_op(node) and _is_of_loop(node) and optimizers.on_gpu(node)}
    return found if all(map(takes, found)) else set()


def _is_of_loop(node: fx.Node) -> bool:
    """Whether a call of an optimizer computes something from tensors that are no lists."""
    if (
        node_meta.origin(node).region is not Region.OPTIMIZER
        or op_info.is_indexwise(node.target)
        or op_info.is_view(node)
    ):
        return False
    return not op_info.needs_peers(node.target) and any(True for _ in node_meta.tensors(node))


def _is_of_one_size(node: fx.Node) -> bool:
    """Whether a call gives one tensor and reads others of its shape, or numbers; all of types that a kernel knows, and
    on one device: a rate that is a tensor of the host lies where no kernel can read it."""
    value = node_meta.value(node)
    if not isinstance(value, Tensor):
        return False
    every = [
        value,
        *(one for arg in node.all_input_nodes if arg.target is not element for one in node_meta.tensors(arg)),
    ]
    if any(not isinstance(size, int) for one in every for size in one.shape):
        return False  # it is data, or moves between calls: a plan of blocks is made for one size
    same = all(one.shape in (value.shape, ()) and one.device == value.device for one in every)
    return same and all(one.dtype in _OF_LOOPS for one in every)


def _has_text(node: fx.Node) -> bool:
    name = _plain_name(node.target)
    return bool(name) and (tensor_scalars.takes_numbers(node) or triton_codegen.has_text(name))


def _plain_name(op: Any) -> str:
    """``add`` for ``_foreach_add`` and ``add``; empty for what is no operator of ATen."""
    namespace, name = op._schema.name.split("::")
    return name.removeprefix("_foreach_") if namespace == "aten" else ""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor or number that is read, by its number."""

    number: int


@dataclass(frozen=True, slots=True)
class Item:
    """What a line gives in the list number `place`."""

    line: int
    place: int


@dataclass(frozen=True, slots=True)
class One:
    """A list, of which only this entry counts."""

    entry: Any


@dataclass(frozen=True, slots=True)
class Line:
    """One index of a call, or a call without lists. Arguments: leaves, items, lists of one of them, and constants."""

    op: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    dtype: torch.dtype
    """Of the first result."""

    def run(self, bound: Callable[[Any], Any]) -> list[Any]:
        """The entries of the lists that the call gives; None of lists that are empty. `bound` gives arguments."""
        args, kwargs = tuple(map(bound, self.args)), {key: bound(value) for key, value in self.kwargs}
        name, like = _plain_name(self.op), torch.empty(0, dtype=self.dtype)
        if not op_info.is_indexwise(self.op):
            is_rule = tensor_scalars.has_rule(name)
            return [tensor_scalars.by_rule(self.op, args, kwargs, like) if is_rule else self.op(*args, **kwargs)]
        if not name:
            return [one[0] if one else None for one in optimizers.written_out(self.op, args, kwargs)]
        if tensor_scalars.has_rule(name):
            return tensor_scalars.by_rule(self.op, args, kwargs, [like])  # type: ignore[no-any-return]
        single = [arg[0] if isinstance(arg, list) else arg for arg in args]
        return [getattr(torch.ops.aten, name)(*single, **kwargs)]


class Reading:
    """What some results of a segment are computed from, read backwards out of its graph."""

    def __init__(self) -> None:
        self.leaves: dict[fx.Node, int] = {}
        self.lines: list[Line] = []
        self.made: dict[tuple[fx.Node, int], int] = {}
        """Call and index -> line."""

    def value(self, node: fx.Node) -> Leaf | Item:
        """The value of a node, with all that it is made of. Raises NotPointwise."""
        call, path = node, list[int]()
        while call.target is operator.getitem and not op_info.is_view(call):
            path.insert(0, call.args[1])  # type: ignore[arg-type]
            call = call.args[0]  # type: ignore[assignment]
        if path or takes(call):
            return Item(self._line(call, path[-1] if path else 0), path[0] if len(path) > 1 else 0)
        if root_of(node).op != "placeholder":
            raise NotPointwise(f"{node.name} is a view of what the segment computes")
        return Leaf(self.leaves.setdefault(node, len(self.leaves)))

    def _line(self, call: fx.Node, index: int) -> int:
        if (call, index) not in self.made:
            first, of_lists = first_list(call), op_info.is_indexwise(call.target)

            def entry(arg: Any) -> Any:
                return self._argument(arg, index, len(first)) if of_lists else self._entry(arg)

            args, kwargs = tuple(map(entry, call.args)), tuple((key, entry(arg)) for key, arg in call.kwargs.items())
            self.lines.append(Line(call.target, args, kwargs, first[index].dtype))
            self.made[call, index] = len(self.lines) - 1
        return self.made[call, index]

    def _argument(self, arg: Any, index: int, count: int) -> Any:
        if isinstance(arg, (list, tuple)):
            if arg and len(arg) != count:
                raise NotPointwise(f"a list of {len(arg)} beside lists of {count}")
            return One(self._entry(arg[index])) if arg else ()
        if isinstance(arg, fx.Node) and any(one.ndim for one in node_meta.tensors(arg)) and arg.target is not element:
            raise NotPointwise(f"{arg.name} is the same tensor for all indices")
        return self._entry(arg)

    def _entry(self, arg: Any) -> Any:
        return self.value(arg) if isinstance(arg, fx.Node) else arg


def root_of(node: fx.Node) -> fx.Node:
    """What a view is seen of."""
    while op_info.is_view(node):
        node = node.all_input_nodes[0]
    return node


def first_list(call: fx.Node) -> Sequence[Tensor]:
    """The fake values of the list that a call gives, or of the first one; the one value of what gives no list."""
    value = node_meta.value(call)
    if isinstance(value, Tensor):
        return [value]
    return value[0] if isinstance(value[0], (list, tuple)) else value


def dtype_of(leaf: fx.Node) -> torch.dtype:
    """The type that a leaf has in memory."""
    return torch.float64 if leaf.target is element else node_meta.tensor(leaf).dtype


def run(lines: Sequence[Line], leaves: Sequence[Tensor], given: Sequence[Leaf | Item]) -> list[Tensor]:
    """Computes `lines` and gives what `given` names."""
    done: list[list[Any]] = []

    def bound(arg: Any) -> Any:
        if isinstance(arg, One):
            return [bound(arg.entry)]
        if isinstance(arg, Item):
            return done[arg.line][arg.place]
        return leaves[arg.number] if isinstance(arg, Leaf) else arg

    for line in lines:
        done.append(line.run(bound))
    return [bound(one) for one in given]
