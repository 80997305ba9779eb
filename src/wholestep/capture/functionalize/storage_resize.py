"""Storage that a step frees and allocates itself, recorded and made part of the program.

[Note: storage effects]
``t.untyped_storage().resize_(n)`` is no operator, so a trace would lose it. While tracing it leaves a node of its own.
Memory has two sizes here: none, and what the tensor needs; other sizes are refused, as is reading what was freed.

Two cases, told apart by how the tensor comes to the step:
- It comes without memory (a gathered weight between two uses), or the step made it. Then it needs none in the
  program either: what is copied into it is a value like any other, which goes back to the allocator after its last
  reader. If an input is to have memory at the end, it gets it where its WRITE is done.
- It is an input that comes with memory. Then freeing it is an operation of the program, at the place where the step
  does it. Only of what the library promises to leave as it was if the step fails (parameters, buffers, optimizer
  state) it waits for the last call that may fail, as all writes do; arguments are freed at once.
Python that asks for the size of a storage makes that size part of the signature.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.fx as fx

from wholestep.capture.python.tracing_thread import on_this_thread
from wholestep.capture.scalars.host_scalars import running_tracer
from wholestep.errors import CaptureError
from wholestep.ir import graph_edit, node_meta, op_info
from wholestep.ir.dtensor.shards import is_dtensor

_aten = torch.ops.aten
_INTERNAL = ("torch/_subclasses/", "torch/fx/", "wholestep/capture/")
"""Code of the trace itself, which makes fake storages and asks for their sizes at every operation."""

_MOVES = frozenset({"aten::set_", "aten::resize_", "aten::resize_as_"})
"""Operators that give a tensor another place or shape."""

_FILLS = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "_foreach_copy_"})
"""Operators that overwrite their first argument without looking at it."""


def num_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the tensor's storage; -1 where it has none of the ordinary kind, and for one of which this rank has a
    part, which lies elsewhere."""
    return tensor.untyped_storage().nbytes() if tensor.layout is torch.strided and not is_dtensor(tensor) else -1


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether the tensor has elements and no memory for them."""
    return tensor.numel() > 0 and num_bytes(tensor) == 0


@dataclass(slots=True)
class StorageSizes:
    """Sizes of storages that a trace depends on. `why_not` is None if they are the same again."""

    state: list[tuple[str, torch.Tensor, int]] = field(default_factory=list)
    """(name, tensor, bytes)."""
    arguments: list[tuple[int, int]] = field(default_factory=list)
    """(leaf, bytes)."""

    def why_not(self, leaves: Sequence[Any]) -> str | None:
        """The sentence that says which storage has another size."""
        for name, tensor, then in self.state:
            if (now := num_bytes(tensor)) != then:
                return f"the storage of {name} had {then} bytes, has {now}"
        for leaf, then in self.arguments:
            if (now := num_bytes(leaves[leaf])) != then:
                return f"the storage of argument {leaf} had {then} bytes, has {now}"
        return None


def _is_internal(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename.endswith("torch/storage.py"):
        frame = frame.f_back  # one method of a storage calls another
    return frame is not None and any(part in frame.f_code.co_filename for part in _INTERNAL)


class StorageRecorder:
    """The storages of one trace."""

    def __init__(self, reals: list[torch.Tensor]) -> None:
        self._reals = reals
        self.entry = [num_bytes(real) for real in reals]
        """Bytes of the storage of each input, as the call finds it."""
        self.freed = {index for index, real in enumerate(reals) if is_freed(real)}
        """Inputs that come without memory."""
        self._looked: set[int] = set()
        self._inputs: dict[int, list[int]] = {}
        self.freed_at_exit: set[int] = set()
        self.resized: set[int] = set()
        """Inputs whose storage the step resizes."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While open, resizes become nodes of the trace. The inputs must be fake by now."""
        for index, tensor in enumerate(self._reals):
            if tensor.layout is torch.strided:
                self._inputs.setdefault(tensor.untyped_storage()._cdata, []).append(index)
        kind = torch.UntypedStorage
        with (
            patch.object(kind, "resize_", self._resize(kind.resize_)),
            patch.object(kind, "nbytes", self._look(kind.nbytes)),
            patch.object(kind, "size", self._look(kind.size)),
        ):
            yield

    def _look(self, original: Callable[[Any], int]) -> Callable[[Any], int]:
        def look(storage: Any) -> int:
            if not _is_internal(sys._getframe(2)):
                self._looked.add(storage._cdata)
            return original(storage)

        return on_this_thread(look, original)

    def _resize(self, original: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
        def resize(storage: Any, size: int) -> Any:
            if _is_internal(sys._getframe(2)):
                return original(storage, size)
            tracer = running_tracer()
            if tracer is None or storage.device.type != "meta":
                raise CaptureError(
                    "The step resizes the storage of a tensor that wholestep could not find in its arguments, closure, "
                    "globals or attributes. Pass the object that holds it as an argument of the step."
                )
            if size != storage.nbytes():
                owner = _owner(tracer.graph, storage._cdata)
                tracer.create_node("call_function", op_info.RESIZE_STORAGE_, (owner, size), {})
            return original(storage, size)

        return on_this_thread(resize, original)

    def sizes(self) -> list[tuple[int, int]]:
        """Inputs whose size of storage a trace depends on, with that size, bytes."""
        looked = {index for storage in self._looked for index in self._inputs.get(storage, ())}
        return [(index, self.entry[index]) for index in sorted(looked | self.freed | self.resized)]

    def settle(self, graph: fx.Graph, names: Sequence[str]) -> None:
        """Checks resizes and reads after them, and rewrites resizes for functionalization.

        Raises CaptureError with the user's line.
        """
        for node in graph.nodes:
            if _is_inductors(node.target):
                node.target = op_info.RESIZE_STORAGE_
        resizes = graph.find_nodes(op="call_function", target=op_info.RESIZE_STORAGE_)
        if not resizes and not self.freed:
            return
        check = _Check(graph, self.entry, self._inputs, names)
        check.run()
        self.resized = check.resized
        self.freed_at_exit = {index for index in check.resized | self.freed if check.is_freed_at_exit(index)}
        placeholders = graph.find_nodes(op="placeholder")
        with_memory = {_storage(node_meta.tensor(placeholders[index])) for index in check.resized - self.freed}
        for node in resizes:
            _make_functional(graph, node, own=_storage(_resized_tensor(node)) in with_memory)

    def exit_writes(self, writes: dict[int, fx.Node]) -> dict[int, fx.Node]:
        """`writes` less those to inputs that come without memory and leave without it."""
        return {index: new for index, new in writes.items() if index not in self.freed & self.freed_at_exit}


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Storage and shape of a tensor: what a step may not change of its inputs."""
    return _storage(tensor), tuple(tensor.shape), tensor.dtype


def check_places(tensors: Sequence[torch.Tensor], before: Sequence[tuple[Any, ...]], names: Sequence[str]) -> None:
    """Raises CaptureError where the step gave an input other storage or another shape."""
    for name, tensor, then in zip(names, tensors, before, strict=True):
        if place_of(tensor) == then:
            continue
        tracer = running_tracer()
        calls = (
            [n for n in tracer.graph.nodes if op_info.is_op(n) and n.target._schema.name in _MOVES] if tracer else []
        )
        where = f" at {node_meta.origin(calls[-1]).source}" if calls else ""
        raise CaptureError(
            f"The step gives {name} other storage or another shape{where} (an assignment to .data, set_() or "
            f"resize_()). A graph can only write values: copy_() into it under torch.no_grad(). Its memory is freed by "
            f"untyped_storage().resize_(0)."
        )


def fold_resizes(graph: fx.Graph) -> None:
    """``copy(x, new)``, which functionalization makes of a resize, is `new`: nothing of `x` is left to be read."""
    copies = graph.find_nodes(op="call_function", target=_aten.copy.default)
    graph_edit.replace_nodes({node: node.args[1] for node in copies if gives_memory(node)})


def gives_memory(node: fx.Node) -> bool:
    """Whether a call is such a copy, or the one in place that it is made of."""
    if node.target not in (_aten.copy.default, _aten.copy_.default):
        return False
    new = node.args[1]
    return isinstance(new, fx.Node) and new.target in (op_info.RESIZE_STORAGE, _aten.empty_strided.default)


def _make_functional(graph: fx.Graph, node: fx.Node, *, own: bool) -> None:
    tensor, size = _resized_tensor(node), node.args[1]
    with graph.inserting_before(node):
        new: fx.Node | None = None
        if own:
            new = graph.call_function(op_info.RESIZE_STORAGE, node.args)
        elif size:
            layout: Any = {"dtype": tensor.dtype, "device": tensor.device}
            shape: Any = (list(tensor.shape), list(tensor.stride()))
            new = graph.call_function(_aten.empty_strided.default, shape, layout)
        if new is not None:
            write = graph.call_function(_aten.copy_.default, (node.args[0], new))
            for made in (new, write):
                node_meta.set_origin(made, node_meta.origin(node))
    graph.erase_node(node)


def _is_inductors(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.name == "inductor::resize_storage_bytes_"


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else -id(tensor)


def _resized_tensor(node: fx.Node) -> torch.Tensor:
    return node_meta.tensor(node.args[0])  # type: ignore[arg-type]


def _owner(graph: fx.Graph, storage: int) -> fx.Node:
    """The value with the most elements of those that live in a storage; of several the latest."""
    largest: tuple[int, fx.Node] | None = None
    for node in reversed(graph.nodes):
        value = node_meta.value(node)
        if isinstance(value, torch.Tensor) and _storage(value) == storage:
            extent = value.numel() * value.element_size()
            if largest is None or extent > largest[0]:
                largest = extent, node
    if largest is None:
        raise CaptureError("The step resizes the storage of a tensor that is no part of what was traced.")
    return largest[1]


class _Check:
    """Follows the storages of a trace in order: which have memory, and which hold something."""

    def __init__(self, graph: fx.Graph, entry: list[int], inputs: dict[int, list[int]], names: Sequence[str]) -> None:
        self._graph, self._entry, self._inputs, self._names = graph, entry, inputs, names
        self._placeholders = graph.find_nodes(op="placeholder")
        tensors = [(node_meta.tensor(node), size) for node, size in zip(self._placeholders, entry, strict=False)]
        self._lost = {_storage(tensor): "" for tensor, size in tensors if size == 0 and tensor.numel()}
        """Storage without memory -> the user's line that freed it; "" if it came so."""
        self._empty: dict[int, str] = {}
        """Storage that has memory and nothing in it yet -> the user's line that allocated it."""
        self.resized: set[int] = set()

    def run(self) -> None:
        """Raises CaptureError at the first read of freed memory, or at a refused resize."""
        for node in self._graph.nodes:
            if node.target is op_info.RESIZE_STORAGE_:
                self._resize(node)
            elif node.op == "output":
                for arg in node.all_input_nodes:
                    self._read(arg, node)
            elif node.op == "call_function" and not op_info.reads_no_values(node.target):
                filled = list(_filled(node))
                for arg in node.all_input_nodes:
                    if arg not in filled:
                        self._read(arg, node)
                for arg in filled:
                    self._fill(arg, node)

    def is_freed_at_exit(self, index: int) -> bool:
        """Whether an input has no memory when the step ends."""
        return _storage(node_meta.tensor(self._placeholders[index])) in self._lost

    def _resize(self, node: fx.Node) -> None:
        tensor, size = _resized_tensor(node), node.args[1]
        storage, where = _storage(tensor), node_meta.origin(node).source
        needed = tensor.numel() * tensor.element_size()
        inputs = self._inputs.get(storage, [])
        whole = tensor.storage_offset() == 0 and torch.ops.aten.is_non_overlapping_and_dense(tensor)
        whole = whole and all(self._entry[index] in (0, needed) for index in inputs)
        if size not in (0, needed) or not whole:
            raise CaptureError(
                f"The step could not be captured at {where}\na storage is resized to {size} bytes, and the tensor in "
                f"it, {_spell(tensor)}, {f'needs {needed}' if whole else 'is a part of it'}. A step may free the "
                f"storage of a tensor that fills it (0 bytes) or allocate what the tensor needs; for anything else "
                f"make a new tensor."
            )
        if len(inputs) > 1:
            names = " and ".join(self._names[index] for index in inputs)
            raise CaptureError(
                f"The step could not be captured at {where}\nthe storage of {names}, which share it, is resized. Give "
                f"each of them a storage of its own, or resize it outside the step."
            )
        self.resized.update(inputs)
        if size == 0:
            self._lost[storage] = where
            self._empty.pop(storage, None)
        else:
            self._lost.pop(storage, None)
            self._empty[storage] = where

    def _fill(self, arg: fx.Node, node: fx.Node) -> None:
        for tensor in node_meta.tensors(arg):
            self._empty.pop(_storage(tensor), None)
            if _storage(tensor) in self._lost and tensor.numel():
                self._refuse(tensor, node, "writes to")

    def _read(self, arg: fx.Node, node: fx.Node) -> None:
        for tensor in node_meta.tensors(arg):
            if tensor.numel() and _storage(tensor) in self._lost.keys() | self._empty.keys():
                self._refuse(tensor, node, "returns" if node.op == "output" else "reads")

    def _refuse(self, tensor: torch.Tensor, node: fx.Node, does: str) -> None:
        storage = _storage(tensor)
        inputs = self._inputs.get(storage, [])
        name = self._names[inputs[0]] if inputs else _spell(tensor)
        if storage in self._empty:
            why = f"allocated at {self._empty[storage]} and not filled since"
        else:
            why = f"freed at {self._lost[storage]}" if self._lost[storage] else "freed already when the step was called"
        what = f"{node.target} {does}" if node.op == "call_function" else f"the step {does}"
        where = node_meta.origin(node).source
        raise CaptureError(
            f"The step could not be captured{f' at {where}' if where else ''}\n{what} {name}, whose storage was "
            f"{why}. Resize it and fill it (copy_) before it is used again."
        )


def _filled(node: fx.Node) -> Iterator[fx.Node]:
    """Arguments that the call overwrites without reading them."""
    if not op_info.is_op(node):
        return
    schema = node.target._schema  # type: ignore[union-attr]
    if schema.name.split("::")[1] in _FILLS:
        yield from graph_edit.nodes_of([node.args[0]])
    yield from op_info.argument_nodes(node, [place for place, arg in enumerate(schema.arguments) if arg.is_out])


def _spell(tensor: torch.Tensor) -> str:
    return f"a tensor {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
