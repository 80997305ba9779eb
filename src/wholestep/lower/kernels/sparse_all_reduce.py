"""All-reduce of embeddings' gradients by copies of the rows that were looked up, and not of tables.

All on the wire, the stream of `lower/kernels/copy_all_reduce.py`::

    meet    all ranks are past what they did with their memory for earlier messages
    pack    each rank puts the indices it has looked up, and the rows of its table there, into its own slot
    push    ... and copies it into its slot in the memory of the others
    meet    all slots have come
    add     each rank adds the rows of all slots, in the order of the ranks, in its table; other rows are left alone
    meet    nobody reads a slot any more

Nothing is sorted: a row that was looked up twice is twice in a slot, with the same values, of which one is found and
added. Sums are those of `lower/kernels/add_chunks.py`, bit by bit, since rows that a rank has not looked up are zero.

Note: a rank with more rows than there is room for
    It has a CUDA graph of its own, and the others theirs, which know nothing of it. So it says in its slot that there
    are no rows, and puts its whole table into its own memory, from where the others read it while they add. That holds
    multiprocessors and takes longer than a reduction by parts, and asks nothing of the others' graphs.

Memory of a rank, which is that of `lower/kernels/copy_all_reduce.py`::

    whole table | slot of rank 0 | slot of rank 1 | ...          slot:  number of rows | indices | rows
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from wholestep.ir import node_meta
from wholestep.ir.ops.collectives import (
    ALL_REDUCE_ROWS,
    ALL_REDUCE_ROWS_,
    LIBRARY,
    group_named,
    started_on_this_stream,
)
from wholestep.ir.program import Program
from wholestep.lower.codecache import triton_cache
from wholestep.lower.kernels import copy_all_reduce
from wholestep.lower.kernels.copy_all_reduce import WIRE, Peers

try:
    import triton
    import triton.language as tl
except ImportError:  # builds of torch for CPUs come without it
    triton = tl = None

LEAST_TABLE_BYTES = 32 << 20
"""Below, what meetings and kernels take is more than what is saved."""
WHOLE = -1
"""In the place of a number of rows."""
_ALIGNED_BYTES = 128
_HEAD = _ALIGNED_BYTES // 4
"""Integers before a slot's indices, of which the first one is the number of rows."""
_BLOCK = 1024
"""Elements of a row that a program reads at once; of indices, too."""
_ROWS = 4
"""Rows of the table that a program looks at. Most have nothing to add."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where things lie in the memory of every rank, for one table. The same on every rank."""

    num_rows: int
    width: int
    dtype: torch.dtype
    slots_start: int
    """Bytes before the first slot."""
    slot_bytes: int
    capacity: int
    """How many rows a slot has room for; less than 1 where there is none for the table."""

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype, num_ranks: int) -> Layout:
        """That for tables of this shape, (rows, width)."""
        start = _aligned(math.prod(shape) * dtype.itemsize)
        slot_bytes = (copy_all_reduce.memory_bytes(num_ranks) - start) // num_ranks // _ALIGNED_BYTES * _ALIGNED_BYTES
        room_bytes = slot_bytes - 2 * _ALIGNED_BYTES  # the head, and what is lost to alignment
        return cls(
            num_rows=shape[0], width=shape[1], dtype=dtype, slots_start=start, slot_bytes=slot_bytes,
            capacity=min(shape[0], room_bytes // (4 + shape[1] * dtype.itemsize)),
        )  # fmt: skip

    @property
    def rows_start(self) -> int:
        """Bytes of a slot before its rows."""
        return _aligned(4 * (_HEAD + self.capacity))

    def used_bytes(self, count: int) -> int:
        """Bytes of a slot that are sent with so many rows."""
        return self.rows_start + count * self.width * self.dtype.itemsize

    def slot(self, memory: Tensor, rank: int) -> Tensor:
        """The slot of a rank in the memory of another one, as bytes."""
        start = self.slots_start + rank * self.slot_bytes
        return memory[start : start + self.slot_bytes]

    def indices(self, slot: Tensor) -> Tensor:
        """The number of rows of a slot at its start, and their indices from `_HEAD` on."""
        return slot[: self.rows_start].view(torch.int32)

    def rows(self, slot: Tensor) -> Tensor:
        """The rows of a slot, of shape (capacity, width)."""
        return slot[self.rows_start : self.used_bytes(self.capacity)].view(self.dtype).view(-1, self.width)

    def whole(self, memory: Tensor) -> Tensor:
        """The place of a rank's whole table in its memory."""
        shape = (self.num_rows, self.width)
        return memory[: math.prod(shape) * self.dtype.itemsize].view(self.dtype).view(shape)


def most_rows(shape: Sequence[int], dtype: torch.dtype, num_ranks: int) -> int:
    """As how many rows, at most, a gradient of this shape had better go; 0: not as rows.

    Each of n ranks gives its rows to n - 1 others. In a reduction by parts it gives twice (n - 1)/n of the table; rows
    are to be half of that at most.
    """
    if len(shape) != 2 or math.prod(shape) * dtype.itemsize < LEAST_TABLE_BYTES:
        return 0
    return max(0, min(Layout.of(shape, dtype, num_ranks).capacity, shape[0] // num_ranks))


class Kernels(Protocol):
    """What runs on a device."""

    def pack(self, table: Tensor, indices: Tensor, slot: Tensor, layout: Layout) -> None:
        """Writes the number of rows, the indices, of shape (rows), and the rows of the table there to a slot."""
        ...

    def add(self, table: Tensor, memories: Sequence[Tensor], layout: Layout) -> None:
        """Adds the rows of all slots in the memory of this rank, of all `memories`, to the table's own."""
        ...


def all_reduce_rows(table: Tensor, indices: Tensor | None, peers: Peers, kernels: Kernels) -> None:
    """Leaves the sum, or the mean, of the tables of all ranks in the table of each.

    The wire has waited for the table. The sum is there after `WIRE`, and nobody reads anything any more.

    Args:
        table: shape (rows, width), contiguous.
        indices: int32, outside of which all rows are zero; None, or more than there is room for: any may be.
    """
    layout = Layout.of(table.shape, table.dtype, peers.size)
    memories = [peers.memory(rank, torch.uint8) for rank in range(peers.size)]
    own = layout.slot(memories[peers.rank], peers.rank)
    if indices is not None and len(indices) > layout.capacity:
        indices = None
    peers.meet(WIRE)
    if indices is None:
        peers.run(WIRE, partial(layout.indices(own)[:1].fill_, WHOLE))
        peers.run(WIRE, partial(copy_all_reduce.copy, layout.whole(memories[peers.rank]), table))
    else:
        peers.run(WIRE, partial(kernels.pack, table, indices, own, layout))
    used_bytes = _ALIGNED_BYTES if indices is None else layout.used_bytes(len(indices))
    for step in range(1, peers.size):
        there = layout.slot(memories[(peers.rank + step) % peers.size], peers.rank)
        peers.run(WIRE, partial(copy_all_reduce.copy, there[:used_bytes], own[:used_bytes]))
    peers.meet(WIRE)
    peers.run(WIRE, partial(kernels.add, table, memories, layout))
    peers.meet(WIRE)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES


def _pack(memory, count, width: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    table, indices, head, rows = memory
    number = tl.program_id(0).to(tl.int64)
    if number == 0:
        tl.store(head, count)
    if number < count:
        index = tl.load(indices + number)
        tl.store(head + 32 + number, index)  # 32 is `_HEAD`
        for start in range(0, width, block):
            columns = start + tl.arange(0, block)
            row = tl.load(table + index.to(tl.int64) * width + columns, mask=columns < width)
            tl.store(rows + number * width + columns, row, mask=columns < width)


def _place(memory, stride, ranks: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    heads, places = memory
    rank = tl.program_id(1).to(tl.int64)
    head = heads + rank * stride
    number = tl.program_id(0) * block + tl.arange(0, block)
    inside = number < tl.load(head)
    index = tl.load(head + 32 + number, mask=inside, other=0).to(tl.int64)
    tl.store(places + index * ranks + rank, number, mask=inside)


def _add(memory, wholes, sizes, how: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    table, heads, rows, places = memory
    num_rows, head_stride, row_stride = sizes
    ranks: tl.constexpr = how[0]
    width: tl.constexpr = how[4]
    number = tl.program_id(0).to(tl.int64) * how[3] + tl.arange(0, how[3])
    inside = number < num_rows
    any_place = tl.full([how[3]], -1, tl.int32)
    for other in tl.static_range(ranks):
        place = tl.load(places + number * ranks + other, mask=inside, other=-1)
        any_place = tl.maximum(any_place, tl.where(tl.load(heads + other * head_stride) < 0, 0, place))
    if tl.max(any_place, 0) >= 0:
        for start in range(0, width, block):
            columns = start + tl.arange(0, block)
            there = (inside & (any_place >= 0))[:, None] & (columns < width)[None, :]
            at = number[:, None] * width + columns[None, :]
            total = tl.full([how[3], block], 0.0, tl.float64 if table.dtype.element_ty == tl.float64 else tl.float32)
            for other in tl.static_range(ranks):
                if other == how[1]:
                    part = tl.load(table + at, mask=there, other=0.0)
                else:
                    place = tl.load(places + number * ranks + other, mask=inside, other=-1)
                    if tl.load(heads + other * head_stride) < 0:
                        part = tl.load(wholes[other] + at, mask=there, other=0.0)
                    else:
                        row = rows + other * row_stride + place[:, None].to(tl.int64) * width + columns[None, :]
                        part = tl.load(row, mask=there & (place >= 0)[:, None], other=0.0)
                total += part.to(total.dtype)
            if how[2]:
                total *= (tl.full([], 1.0, tl.float64) / ranks).to(total.dtype)
            tl.store(table + at, total.to(table.dtype.element_ty), mask=there)


_pack_kernel: Any = triton.jit(_pack) if triton is not None else None
_place_kernel: Any = triton.jit(_place) if triton is not None else None
_add_kernel: Any = triton.jit(_add) if triton is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class OnGPU:
    """`Kernels` by Triton, for the rank of a group."""

    rank: int
    averages: bool
    places: Tensor
    """Room for where the rows of the table are in slots: int32, of shape (rows, ranks)."""

    def pack(self, table: Tensor, indices: Tensor, slot: Tensor, layout: Layout) -> None:
        """See `Kernels`."""
        triton_cache.wait()
        memory = (table, indices, layout.indices(slot), layout.rows(slot))
        _pack_kernel[(max(1, len(indices)),)](memory, len(indices), layout.width, _BLOCK)

    def add(self, table: Tensor, memories: Sequence[Tensor], layout: Layout) -> None:
        """See `Kernels`."""
        triton_cache.wait()
        ranks, slot = len(memories), layout.slot(memories[self.rank], 0)
        heads, strides = layout.indices(slot), (layout.slot_bytes // 4, layout.slot_bytes // layout.dtype.itemsize)
        self.places.fill_(-1)
        _place_kernel[(-(-layout.capacity // _BLOCK), ranks)]((heads, self.places), strides[0], ranks, _BLOCK)
        memory = (table, heads, layout.rows(slot), self.places)
        wholes, sizes = tuple(map(layout.whole, memories)), (layout.num_rows, *strides)
        how = (ranks, self.rank, self.averages, _ROWS, layout.width)
        _add_kernel[(-(-layout.num_rows // _ROWS),)](memory, wholes, sizes, how, _BLOCK)


def _all_reduce_rows_(table: Tensor, reduce_op: str, group: str, *, indices: Tensor | None = None) -> Tensor:
    peers = copy_all_reduce.group_of(group, table.device).peers
    with torch.no_grad():
        # A copy, as the indices may be overwritten before the wire reads them.
        wanted = None if indices is None else indices.reshape(-1).to(torch.int32, copy=True)
        places = torch.empty((len(table), peers.size), dtype=torch.int32, device=table.device)
        wire = peers.streams[WIRE]
        wire.wait_stream(torch.cuda.current_stream(table.device))
        all_reduce_rows(table, wanted, peers, OnGPU(rank=peers.rank, averages=reduce_op == "avg", places=places))
    with torch.cuda.stream(wire):
        return started_on_this_stream(table, places, *([] if wanted is None else [wanted]))


LIBRARY.impl("all_reduce_rows_by_copies_", _all_reduce_rows_, "CUDA")


def builds(program: Program) -> Iterator[triton_cache.Job]:
    """What has Triton compile the kernels for a program's tables."""
    nodes = program.graph.nodes
    starts = [node for node in nodes if node.target in (ALL_REDUCE_ROWS, ALL_REDUCE_ROWS_)]
    tables = ((node_meta.tensor(one.args[0]), *one.args[1:]) for one in starts)
    wanted = ((table.dtype, table.shape[1], reduce_op, name) for table, reduce_op, name in tables)
    for dtype, width, reduce_op, name in dict.fromkeys(wanted):
        group = group_named(name)
        yield from build(dtype, width, size=group.size(), rank=group.rank(), averages=reduce_op == "avg")


def build(dtype: torch.dtype, width: int, *, size: int, rank: int, averages: bool) -> Iterator[triton_cache.Job]:
    """What has Triton compile the kernels for tables in `dtype`, as launches for most of them would: the
    numbers of their rows are multiples of 16."""
    table, ints, how = dtype, torch.int32, (size, rank, averages, _ROWS, width)
    packed, placed = triton_cache.addresses([table, ints, ints, table]), triton_cache.addresses([ints] * 2)
    added, wholes = triton_cache.addresses([table, ints, table, ints]), triton_cache.addresses([table] * size)
    yield partial(_pack_kernel.warmup, packed, 16, width, _BLOCK, grid=(1,))
    yield partial(_place_kernel.warmup, placed, 16, size, _BLOCK, grid=(1, 1))
    yield partial(_add_kernel.warmup, added, wholes, (16,) * 3, how, _BLOCK, grid=(1,))
