"""Gradients are computed straight into their bucket, so that filling it copies nothing.

Before and after, once `reinplace` has run::

    mm = aten.mm.default(a, b)                        flat = aten.empty.memory_format([6], ...)
    ...                                               part = aten.as_strided.default(flat, [2, 3], [3, 1], 0)
    flat = aten.cat.default([view(mm), ...])   ->     mm = aten.mm.out(a, b, out=part)
    all_reduce_(flat)                                 ...
                                                      all_reduce_(flat)

Note: when a gradient may live in its bucket
    Its memory was made by an operator that can write its result anywhere; it is dense, and of the bucket's type;
    nothing reads it after the place where the bucket is filled, since the reduction changes it. Its place is aligned
    where it is a matrix product: to memory that is not, MKL writes other bits (seen with AVX2). Gradients for which
    that does not hold are copied into their place. A bucket of which less than half could be filled so keeps its one
    ``cat``, but for one of many parts on a GPU. The bucket is alive from its first gradient on; where that would raise
    the peak, the first ones are copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.fx as fx

from wholestep.ir import graph_edit, node_meta, op_info, printer
from wholestep.ir.program import Program
from wholestep.passes.analysis.alias_analysis import Memory, span_of
from wholestep.passes.analysis.task_graph import live_bytes

_aten = torch.ops.aten

# Operators whose kernel for ``out=`` is the one that computes: others would make a tensor and copy it.
_OUT = {
    _aten.mm.default: _aten.mm.out,
    _aten.mm.dtype: _aten.mm.dtype_out,
    _aten.bmm.default: _aten.bmm.out,
    _aten.addmm.default: _aten.addmm.out,
    _aten.sum.dim_IntList: _aten.sum.IntList_out,
    _aten.add.Tensor: _aten.add.out,
    _aten.mul.Tensor: _aten.mul.out,
}


_PRODUCTS = (_aten.mm.out, _aten.mm.dtype_out, _aten.bmm.out, _aten.addmm.out)

_FEW = 16
"""Parts of which a ``cat`` of GPUs is as fast as copies by a list. It cuts all of them as the largest one wants it: for
the 99 small gradients of W1, 3.5 MB, it takes 92 us beside messages."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """A gradient's place in a bucket, elements."""

    start: int
    flat: fx.Node
    """The gradient in one dimension, as the ``cat`` is given it."""
    maker: fx.Node | None
    """The call that made its memory, if it can write it elsewhere."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the gradient."""
        return node_meta.num_bytes(self.flat)


def grads_as_bucket_views(program: Program) -> Program:
    """The scheduled program with gradients written into slices of their buckets."""
    graph = program.graph
    direct = total = 0
    buckets = [node for node in graph.find_nodes(op="call_function", target=_aten.cat.default) if _is_bucket(node)]
    memory = _memory(graph) if buckets else None
    live = live_bytes(program) if buckets else {}
    for node in buckets:
        assert memory is not None
        slots = _within(live, node, _slots(node, memory))
        own = sum(slot.num_bytes for slot in slots if slot.maker is not None)
        total += node_meta.num_bytes(node)
        if 2 * own >= node_meta.num_bytes(node) or (len(slots) > _FEW and _on_gpu(node)):
            _account(live, node, slots)
            _fill(graph, node, slots)
            direct += own
    if not total:
        return program
    graph_edit.remove_dead_code(graph)
    share = f"{printer.bytes_text(direct)} of {printer.bytes_text(total)}"
    return program.with_notes(f"{share} of gradients in buckets of several are computed in their place in the bucket")


def _is_bucket(cat: fx.Node) -> bool:
    """Whether what is put together is flat, and goes into the reduction of a bucket and nowhere else.

    A gradient that is put together of its own parts (that of `nn.MultiheadAttention`) has its shape.
    """
    if node_meta.tensor(cat).dim() != 1:
        return False
    node = cat
    while len(node.users) == 1 and len(cat.args) == 1:
        node = next(iter(node.users))
        if op_info.is_collective(node):
            return node_meta.bucket(node) is not None
        if node.target is not _aten.mul_.Tensor:
            return False
    return False


def _on_gpu(node: fx.Node) -> bool:
    return bool(node_meta.tensor(node).is_cuda)


def _memory(graph: fx.Graph) -> Memory:
    memory = Memory(graph)
    for node in graph.nodes:
        memory.enter(node)
    return memory


def _slots(cat: fx.Node, memory: Memory) -> list[_Slot]:
    slots, start = [], 0
    storages: set[int] = set()
    for flat in graph_edit.nodes_of(cat.args[0]):
        maker = _maker(flat, cat, memory)
        if maker is not None and (memory.storage(node_meta.tensor(maker)) in storages or not _may_write(maker, start)):
            maker = None
        storages.add(memory.storage(node_meta.tensor(flat)))
        slots.append(_Slot(start, flat, maker))
        start += node_meta.tensor(flat).numel()
    return slots


def _may_write(maker: fx.Node, start: int) -> bool:
    """Whether it gives the same bits where it writes after `start` elements."""
    place_bytes = start * node_meta.tensor(maker).element_size()
    return _OUT[maker.target] not in _PRODUCTS or place_bytes % node_meta.ALIGNMENT_BYTES == 0  # type: ignore[index]


def _maker(flat: fx.Node, cat: fx.Node, memory: Memory) -> fx.Node | None:
    """The call that makes the memory of `flat` and could make it in the bucket."""
    block = memory.block(flat)
    maker = block.values[0]
    if block.inputs or block.constant or maker.target not in _OUT or memory.read_later(maker, memory.position[cat]):
        return None
    made, grad = node_meta.tensor(maker), node_meta.tensor(flat)
    dense = made.storage_offset() == 0 and made.numel() * made.element_size() == made.untyped_storage().nbytes()
    same = made.dtype == grad.dtype == node_meta.tensor(cat).dtype and span_of(made) == span_of(grad)
    return maker if dense and same else None


def _within(live: dict[fx.Node, int], cat: fx.Node, slots: list[_Slot]) -> list[_Slot]:
    """The slots, with as many copied as the peak of memory asks for, the earliest first.

    The bucket is alive from the first gradient that is made in it, all of it.
    """
    peak = max(live.values())
    place = {node: number for number, node in enumerate(live)}
    direct = sorted((slot for slot in slots if slot.maker is not None), key=lambda slot: place[slot.maker])  # type: ignore[index]
    while direct and any(live[node] + more > peak for node, more in _more_bytes(live, cat, direct)):
        direct.pop(0)
    kept = {slot.maker for slot in direct}
    return [slot if slot.maker in kept else replace(slot, maker=None) for slot in slots]


def _account(live: dict[fx.Node, int], cat: fx.Node, slots: Sequence[_Slot]) -> None:
    """Adds the bucket's bytes before it is full; then there are no gradients beside it."""
    direct = [slot for slot in slots if slot.maker is not None]
    for node, more in list(_more_bytes(live, cat, direct)):
        live[node] += more
    live[cat] -= sum(slot.num_bytes for slot in direct)


def _more_bytes(live: dict[fx.Node, int], cat: fx.Node, direct: Sequence[_Slot]) -> Iterator[tuple[fx.Node, int]]:
    """Bytes alive beyond those of the gradients, from the first slot to the ``cat``."""
    sizes = {slot.maker: slot.num_bytes for slot in direct}
    more = node_meta.num_bytes(cat)
    for node in live:
        if node is cat:
            return
        more -= sizes.get(node, 0)
        if more < node_meta.num_bytes(cat):
            yield node, more


def _fill(graph: fx.Graph, cat: fx.Node, slots: Sequence[_Slot]) -> None:
    """Makes the bucket before the first gradient that is written into it, then the slots."""
    whole = node_meta.tensor(cat)
    makers = {slot.maker for slot in slots if slot.maker is not None}
    first = next(node for node in graph.nodes if node in makers or node is cat)
    with graph.inserting_before(first):
        flat = graph_edit.emit(graph, _aten.empty.memory_format, [whole.numel()], like=cat, **_like(whole))
    copied = []
    for slot in slots:
        if slot.maker is None:
            copied.append(slot)
            continue
        made = node_meta.tensor(slot.maker)
        with graph.inserting_before(slot.maker):
            place = _place(graph, flat, slot, made.shape, made.stride())
            new = graph.call_function(_OUT[slot.maker.target], slot.maker.args, {**slot.maker.kwargs, "out": place})  # type: ignore[index]
            node_meta.copy_meta(slot.maker, new)
            node_meta.set_value(new, node_meta.value(place))
        graph_edit.replace_node(slot.maker, new)
    with graph.inserting_before(cat):
        if copied:
            places = [_place(graph, flat, slot, node_meta.tensor(slot.flat).shape, (1,)) for slot in copied]
            graph_edit.emit(graph, _aten._foreach_copy_.default, places, [slot.flat for slot in copied], like=cat)
    graph_edit.replace_node(cat, flat)


def _place(graph: fx.Graph, flat: fx.Node, slot: _Slot, shape: Sequence[int], stride: Sequence[int]) -> fx.Node:
    like = slot.maker or slot.flat
    return graph_edit.emit(graph, _aten.as_strided.default, flat, list(shape), list(stride), slot.start, like=like)


def _like(tensor: torch.Tensor) -> dict[str, object]:
    return {"dtype": tensor.dtype, "device": tensor.device, "pin_memory": False}
