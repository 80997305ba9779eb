"""Gradients of embeddings travel as the rows that batches have touched, where that is faster than the whole table.

Before and after, on two ranks, for a batch that looks up 6 rows where the user allows for 8::

    grad = embedding_dense_backward(d, index, 50304, -1)       indices = all_gather(pad(index, to 8), 2)
    all_reduce(grad * 0.5)                                ->   ...                   # forward and backward
                                                               rows = all_gather(pad(d * 0.5, to 8), 2)
                                                               grad = sum_rows(wait(rows), wait(indices), 50304, -1)

Every rank adds up all rows itself. What is read, kept and clipped later is the averaged dense gradient, as ever.
Source of the idea: Kim et al., "Parallax: Sparsity-aware Data Parallel Training of Deep Neural Networks", 2019, which
gathers sparse gradients, as Horovod does.

Note: the same sizes on every rank, in every call
    An all-gather wants as much from each rank, and a rank whose batch changes captures again alone, with nobody to ask.
    So nothing of the plan may depend on this rank's batch: how many rows travel is the user's word
    (`wholestep.config.DDP.embedding_rows`), and whether they do follows from it, the table, the number of ranks and
    the agreed costs. A batch with fewer rows is filled up with zeros for row 0, which change no sum. One with more
    cannot take part in what the other ranks run: it is an error before this rank sends anything. Without the user's
    word the size could only be that of an early batch, and a longer one on a single rank would have no way out.

Note: the same bits on every rank
    Parameters are equal on all ranks because gradients are. Rows lie in rank order on every rank, and `SUM_ROWS` adds
    them in an order that depends on the indices alone: it is ATen's own kernel, and never one of Inductor's, which
    adds with atomics. See `_sum_rows`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.fx as fx

from wholestep.cost.compute import Kind, Work
from wholestep.cost.model import CostModel
from wholestep.errors import ConfigError
from wholestep.passes.bucket import Reduction, reductions_of
from wholestep.program import edit, meta, ops, show
from wholestep.program.program import Program

_aten = torch.ops.aten

ENOUGH = 0.7
"""Rows travel where they take at most this share of the predicted time of the table: predictions are no better."""

_INDEX_BYTES = 8
_SUM_CALLS = 10
"""Kernels of a sum of sorted rows besides those that move them."""
_SUM_PASSES = 3
"""How often that reads or writes every row."""
_MOST_ELEMENTS = 2**31 - 1
"""Of all rows together: kernels of ATen number them with 32 bits."""

_LEAST_SORTED = 3073
"""Indices from which on ATen sorts them on a GPU."""

ops.LIBRARY.define("sum_rows(Tensor rows, Tensor indices, SymInt num_rows, SymInt padding_idx) -> Tensor")


def _sum_rows(rows: torch.Tensor, indices: torch.Tensor, num_rows: int, padding_idx: int) -> torch.Tensor:
    """(count, width) and (count,) int64 -> (num_rows, width): the sum of the rows of each index, others 0.

    The same bits wherever the arguments are the same. On a CPU ATen's ``embedding_dense_backward`` adds in the order
    of the rows, each index in one thread. On a GPU it sorts the indices, stably, and adds runs of ten rows and then
    those sums, without atomics. That is its way from 3,073 indices on: the kernel for fewer reads indices of one batch
    while it loads those of the next one in some versions (pytorch/pytorch#187687), so there are as many here. Sums of
    types of two bytes are float32 and rounded at the end: so ATen does it on a GPU.
    """
    missing = _LEAST_SORTED - indices.shape[0]
    if rows.is_cuda and missing > 0:
        rows, indices = _aten.constant_pad_nd(rows, [0, 0, 0, missing]), _aten.constant_pad_nd(indices, [0, missing])
    wide = rows if rows.is_cuda or rows.itemsize > 2 else rows.float()
    total: torch.Tensor = _aten.embedding_dense_backward.default(wide, indices, num_rows, padding_idx, False)
    return total.to(rows.dtype)


ops.LIBRARY.impl("sum_rows", _sum_rows, "CompositeExplicitAutograd")
torch.library.register_fake(
    "wholestep::sum_rows",
    lambda rows, indices, num_rows, padding_idx: rows.new_empty((num_rows, rows.shape[1])),
    lib=ops.LIBRARY,
)
SUM_ROWS = torch.ops.wholestep.sum_rows.default
"""Adds up rows by index, in an order that is the same on every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A gradient as a table, and as the rows that could travel in its place."""

    num_rows: int
    """Of the table."""
    width: int
    """Elements of a row."""
    itemsize: int
    """Bytes of an element."""
    limit: int
    """Rows of one rank."""
    ranks: int

    @property
    def num_elements(self) -> int:
        """Of the rows of all ranks."""
        return self.ranks * self.limit * self.width

    @property
    def gathered_bytes(self) -> int:
        """Of the rows of all ranks."""
        return self.num_elements * self.itemsize

    @property
    def table_bytes(self) -> int:
        """Of the table."""
        return self.num_rows * self.width * self.itemsize

    def rows_us(self, cost: CostModel) -> float:
        """Predicted time of two all-gathers, and of what the sum takes longer than that of this rank's rows."""
        moved_bytes = _SUM_PASSES * self.gathered_bytes
        work = Work(kind=Kind.POINTWISE, amount=moved_bytes, num_bytes=moved_bytes)
        return (
            cost.collective_us("all_gather", self.gathered_bytes, self.ranks)
            + cost.collective_us("all_gather", self.ranks * self.limit * _INDEX_BYTES, self.ranks)
            + cost.device.device_us((work,))
            + _SUM_CALLS * cost.call_us
            + (2 * cost.launch_us if cost.device.host_is_device else 0.0)
        )

    def table_us(self, cost: CostModel) -> float:
        """Predicted time of the table in a bucket with others: its transfer alone."""
        latency_us = cost.collective_us("all_reduce", 1, self.ranks)
        return cost.collective_us("all_reduce", self.table_bytes, self.ranks) - latency_us


def send_rows(program: Program, *, cost: CostModel, limit: int) -> Program:
    """The program with rows in the place of tables of gradients, where those are predicted to be faster by far.

    Args:
        program: placed, its reductions in no bucket yet.
        cost: predicted times, the same on every rank.
        limit: how many rows of one embedding a rank looks up in a call at most. The same on every rank.

    Only a gradient that is nothing but that of one look-up takes part: one that is added to another (a table that is
    also the output layer, or used twice; a gradient kept from a call before) or that is read before its reduction is
    needed whole, and so is one that is scaled by the frequency of its indices. The notes give the numbers of each.

    Raises:
        ConfigError: the batch looks up more than `limit` rows of a table whose rows travel.
    """
    work, notes = _Rows(program, limit), []
    for one in list(filter(_is_look_up, reductions_of(program))):
        message = work.message(one)
        rows_us, table_us = message.rows_us(cost), message.table_us(cost)
        travels = rows_us <= ENOUGH * table_us and message.num_elements <= _MOST_ELEMENTS
        if travels:
            work.send(one)
        notes.append(
            f"{_names(one)} travels {'as rows' if travels else 'whole'}: predicted {rows_us:.0f} against "
            f"{table_us:.0f} us ({show.bytes_text(message.gathered_bytes)} of rows, "
            f"{show.bytes_text(message.table_bytes)} of table)"
        )
    edit.remove_dead_code(program.graph)
    return program.with_notes(*notes) if notes else program


def _is_look_up(one: Reduction) -> bool:
    """Whether the gradient is that of one look-up, for its reduction alone."""
    if one.grad.target is not _aten.embedding_dense_backward.default or one.grad.args[4]:
        return False
    alone = all(len(node.users) == 1 for node in (one.grad, *one.start.all_input_nodes))
    known = all(isinstance(size, int) for arg in one.grad.all_input_nodes for size in meta.tensor(arg).shape)
    return alone and known and meta.tensor(one.grad).dtype.is_floating_point


def _record(one: Reduction) -> meta.Bucket:
    found = meta.bucket(one.start)
    assert found is not None  # `reductions_of` has looked
    return found


def _names(one: Reduction) -> str:
    return ", ".join(_record(one).members)


class _Rows:
    """The pass at work on one program."""

    def __init__(self, program: Program, limit: int) -> None:
        self.graph, self.limit = program.graph, limit
        self.sizes = {axis.group: axis.size for axis in program.mesh}
        self.gathered: dict[tuple[fx.Node, str], fx.Node] = {}
        """Indices and name of a group -> their all-gather: tables that are looked up alike share one."""

    def message(self, one: Reduction) -> Message:
        """What a gradient is as a table, and as rows."""
        table, size = meta.tensor(one.grad), self.sizes[str(one.start.args[-1])]
        return Message(
            num_rows=table.shape[0], width=table.shape[1], itemsize=table.itemsize, limit=self.limit, ranks=size
        )

    def send(self, one: Reduction) -> None:
        """Puts the sum of everybody's rows in the place of a reduction."""
        self._refuse_more(one)
        record, start = _record(one), one.start
        rows, _, num_rows, padding_idx, _ = one.grad.args
        with self.graph.inserting_before(start):
            flat = edit.emit(self.graph, _aten.reshape.default, rows, [-1, meta.tensor(one.grad).shape[1]], like=start)
            if one.scale is not None:
                flat = edit.emit(self.graph, _aten.mul.Tensor, flat, one.scale, like=start)
            sent = self._all_gather(flat, start)
        meta.set_bucket(sent, replace(record, reason="rows of all ranks in the place of the table"))
        readers = [reader for wait in one.waits for reader in wait.users]
        with self.graph.inserting_before(min(readers, default=self.graph.output_node())):
            arrived = [edit.emit(self.graph, ops.WAIT, node, like=start) for node in (sent, self._indices(one))]
            total = edit.emit(self.graph, SUM_ROWS, *arrived, num_rows, padding_idx, like=start)
        for wait in one.waits:
            edit.replace_node(wait, total)
        self.graph.erase_node(start)

    def _refuse_more(self, one: Reduction) -> None:
        count, source = meta.tensor(one.grad.all_input_nodes[1]).numel(), meta.origin(one.grad).source
        if count > self.limit:
            raise ConfigError(
                f"DDP(embedding_rows={self.limit}) says that no rank looks up more than {self.limit} rows of an "
                f"embedding in a call. This one looks up {count} of {_names(one)}{f' ({source})' if source else ''}. "
                f"Give the number of the largest batch that any rank will see, on every rank; or leave it out, and "
                f"gradients travel whole, whatever the batch."
            )

    def _indices(self, one: Reduction) -> fx.Node:
        """The all-gather of the indices, which starts where they are known: long before the rows are."""
        indices, start = one.grad.all_input_nodes[1], one.start
        key = indices, str(start.args[-1])
        if key not in self.gathered:
            with self.graph.inserting_before(_behind(indices)):
                flat = edit.emit(self.graph, _aten.reshape.default, indices, [-1], like=start)
                if meta.tensor(flat).dtype is not torch.int64:
                    flat = edit.emit(self.graph, _aten._to_copy.default, flat, like=start, dtype=torch.int64)
                self.gathered[key] = self._all_gather(flat, start)
            why, num_bytes = f"indices of the rows of {_names(one)}", self.limit * _INDEX_BYTES
            meta.set_bucket(self.gathered[key], replace(_record(one), members=(), num_bytes=num_bytes, reason=why))
        return self.gathered[key]

    def _all_gather(self, flat: fx.Node, start: fx.Node) -> fx.Node:
        """Starts the all-gather of what is filled up to the limit, over the group of `start`."""
        tensor, group = meta.tensor(flat), str(start.args[-1])
        missing = self.limit - tensor.shape[0]
        if missing:
            around = [*[0, 0] * (tensor.dim() - 1), 0, missing]
            flat = edit.emit(self.graph, _aten.constant_pad_nd.default, flat, around, like=start)
        elif not tensor.is_contiguous():
            flat = edit.emit(self.graph, _aten.clone.default, flat, like=start, memory_format=torch.contiguous_format)
        return edit.emit(
            self.graph, ops.c10d.all_gather_into_tensor.default, flat, self.sizes[group], group, like=start
        )


def _behind(node: fx.Node) -> fx.Node:
    """The node in front of which what reads `node` can stand at the earliest; inputs are first."""
    node = node.next
    while node.op == "placeholder":
        node = node.next
    return node
