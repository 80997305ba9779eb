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
    cannot take part in what the other ranks run: it is an error before anything is sent. Without the user's word the
    size could only be that of an early batch, and a longer one on a single rank would have no way out.

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
"""Rows travel where they take at most this share of the predicted time of the whole table: predictions are no better."""

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
    while it loads those of the next one in some versions (pytorch/pytorch#187687), so there are as many here.
    """
    missing = _LEAST_SORTED - indices.shape[0]
    if rows.is_cuda and missing > 0:
        rows, indices = _aten.constant_pad_nd(rows, [0, 0, 0, missing]), _aten.constant_pad_nd(indices, [0, missing])
    return torch.ops.aten.embedding_dense_backward.default(rows, indices, num_rows, padding_idx, False)


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
    """A table, and the rows that could travel in its place."""

    table_bytes: int
    row_bytes: int
    rows: int
    """Of one rank."""
    ranks: int

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the rows of all ranks."""
        return self.ranks * self.rows * self.row_bytes

    def rows_us(self, cost: CostModel) -> float:
        """Predicted time of two all-gathers and what the sum takes longer than that of this rank's rows."""
        moved_bytes = _SUM_PASSES * self.gathered_bytes
        work = Work(kind=Kind.POINTWISE, amount=moved_bytes, num_bytes=moved_bytes)
        return (
            cost.collective_us("all_gather", self.gathered_bytes, self.ranks)
            + cost.collective_us("all_gather", self.ranks * self.rows * _INDEX_BYTES, self.ranks)
            + cost.device.device_us((work,))
            + _SUM_CALLS * cost.call_us
            + (2 * cost.launch_us if cost.device.host_is_device else 0.0)
        )

    def table_us(self, cost: CostModel) -> float:
        """Predicted time of the table in a bucket with others: its transfer alone."""
        least_us = cost.collective_us("all_reduce", 1, self.ranks)
        return cost.collective_us("all_reduce", self.table_bytes, self.ranks) - least_us


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
    ranks = {axis.group: axis.size for axis in program.mesh}
    gathered: dict[tuple[fx.Node, str], fx.Node] = {}
    notes = []
    for one in list(reductions_of(program)):
        if not _is_look_up(one):
            continue
        names, size, table = _names(one), ranks[str(one.start.args[-1])], meta.tensor(one.grad)
        row_bytes = table.shape[1] * table.element_size()
        message = Message(table_bytes=meta.num_bytes(one.grad), row_bytes=row_bytes, rows=limit, ranks=size)
        rows_us, table_us = message.rows_us(cost), message.table_us(cost)
        sizes = f"{show.bytes_text(message.gathered_bytes)} of rows, {show.bytes_text(message.table_bytes)} of table"
        times = f"predicted {rows_us:.0f} against {table_us:.0f} us ({sizes})"
        if rows_us > ENOUGH * table_us or message.ranks * limit * table.shape[1] > _MOST_ELEMENTS:
            notes.append(f"{names} travels whole: {times}")
            continue
        _refuse_more(one, limit, names)
        _gather(program.graph, one, limit=limit, size=size, gathered=gathered)
        notes.append(f"{names} travels as rows: {times}")
    edit.remove_dead_code(program.graph)
    return program.with_notes(*notes) if notes else program


def _names(one: Reduction) -> str:
    record = meta.bucket(one.start)
    assert record is not None  # `reductions_of` has looked
    return ", ".join(record.members)


def _is_look_up(one: Reduction) -> bool:
    """Whether the gradient is that of one look-up, for its reduction alone."""
    if one.grad.target is not _aten.embedding_dense_backward.default or not one.waits:
        return False
    alone = len(one.grad.users) == 1 and (one.scale is None or len(one.start.all_input_nodes[0].users) == 1)
    by_frequency = one.grad.args[4]
    known = all(isinstance(size, int) for arg in one.grad.all_input_nodes for size in meta.tensor(arg).shape)
    return alone and known and not by_frequency and meta.tensor(one.grad).dtype.is_floating_point


def _refuse_more(one: Reduction, limit: int, names: str) -> None:
    count = meta.tensor(one.grad.all_input_nodes[1]).numel()
    if count > limit:
        source = meta.origin(one.grad).source
        raise ConfigError(
            f"DDP(embedding_rows={limit}) says that no rank looks up more than {limit} rows of an embedding in a call. "
            f"This one looks up {count} of {names}{f' ({source})' if source else ''}. Give the number of the largest "
            f"batch that any rank will see, on every rank; or leave it out, and gradients travel whole, whatever the "
            f"batch."
        )


def _gather(
    graph: fx.Graph, one: Reduction, *, limit: int, size: int, gathered: dict[tuple[fx.Node, str], fx.Node]
) -> None:
    """Puts the sum of everybody's rows in the place of a reduction."""
    rows, indices, num_rows, padding_idx, _ = one.grad.args
    assert isinstance(rows, fx.Node) and isinstance(indices, fx.Node)
    start, group, record = one.start, str(one.start.args[-1]), meta.bucket(one.start)
    assert record is not None
    if (indices, group) not in gathered:
        with graph.inserting_before(_behind(indices)):  # they are known long before the rows
            flat = edit.emit(graph, _aten.reshape.default, indices, [-1], like=start)
            if meta.tensor(flat).dtype is not torch.int64:
                flat = edit.emit(graph, _aten._to_copy.default, flat, like=start, dtype=torch.int64)
            gathered[indices, group] = _all_gather(graph, flat, limit=limit, size=size, group=group, like=start)
        why = f"indices of the rows of {_names(one)}"
        num_bytes = limit * _INDEX_BYTES
        meta.set_bucket(gathered[indices, group], replace(record, members=(), num_bytes=num_bytes, reason=why))
    with graph.inserting_before(start):
        flat = edit.emit(graph, _aten.reshape.default, rows, [-1, meta.tensor(one.grad).shape[1]], like=start)
        if one.scale is not None:
            flat = edit.emit(graph, _aten.mul.Tensor, flat, one.scale, like=start)
        sent = _all_gather(graph, flat, limit=limit, size=size, group=group, like=start)
    meta.set_bucket(sent, replace(record, reason="rows of all ranks in the place of the table"))
    with graph.inserting_before(min(user for wait in one.waits for user in (*wait.users, graph.output_node()))):
        arrived = [edit.emit(graph, ops.WAIT, node, like=start) for node in (sent, gathered[indices, group])]
        total = edit.emit(graph, SUM_ROWS, *arrived, num_rows, padding_idx, like=start)
    for wait in one.waits:
        edit.replace_node(wait, total)
    graph.erase_node(start)


def _all_gather(graph: fx.Graph, flat: fx.Node, *, limit: int, size: int, group: str, like: fx.Node) -> fx.Node:
    """Starts the all-gather of what is filled up to `limit` rows, over a group of `size` ranks."""
    tensor = meta.tensor(flat)
    missing = limit - tensor.shape[0]
    if missing:
        around = [*[0, 0] * (tensor.dim() - 1), 0, missing]
        flat = edit.emit(graph, _aten.constant_pad_nd.default, flat, around, like=like)
    elif not tensor.is_contiguous():
        flat = edit.emit(graph, _aten.clone.default, flat, like=like, memory_format=torch.contiguous_format)
    return edit.emit(graph, ops.c10d.all_gather_into_tensor.default, flat, size, group, like=like)


def _behind(node: fx.Node) -> fx.Node:
    """The node behind which what reads `node` can stand, inputs being first."""
    node = node.next
    while node.op == "placeholder":
        node = node.next
    return node
