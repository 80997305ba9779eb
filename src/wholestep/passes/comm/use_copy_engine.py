"""Sends large reductions through the copy engines, where ranks can map peers' memory.

A reduction by NCCL holds multiprocessors for as long as it runs, and a product of matrices that is cut for all of them
takes up to twice as long beside it. What runs instead is in `lower/kernels/copy_all_reduce.py`, and for tables of
embeddings in `lower/kernels/sparse_all_reduce.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.fx as fx

from wholestep.ir import node_meta, op_info, printer
from wholestep.ir.ops.collectives import ALL_REDUCE_BY_COPIES, ALL_REDUCE_ROWS
from wholestep.ir.program import Program, Stage
from wholestep.passes.comm.wire_format import lookup_indices

MIN_BYTES = 4 << 20
"""Of a message: below, its meetings cost more than the multiprocessors of NCCL."""

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def use_copy_engine(program: Program, *, why_not: Callable[[str, torch.device], str]) -> Program:
    """The program with its large sums and means by copies.

    `why_not` says of a group, by its name, and a device why that cannot be; empty if it can. The note says how many
    reductions go which way, and why.
    """
    if program.stage is Stage.SCHEDULED:
        return program
    count = num_bytes = others = 0
    reasons: dict[str, None] = {}
    for start in program.graph.find_nodes(op="call_function", target=op_info.c10d.all_reduce.default):
        message, op, group = node_meta.tensor(start.args[0]), start.args[1], str(start.args[2])
        large = message.nbytes >= MIN_BYTES and message.is_contiguous()
        if not large or op not in ("sum", "avg") or message.dtype not in _DTYPES:
            others += 1
        elif reason := why_not(group, message.device):
            reasons[reason] = None
            others += 1
        else:
            _go_by_copies(start)
            count, num_bytes = count + 1, num_bytes + message.nbytes
    if not count and not reasons:
        return program
    ways = f"{count} reductions by copy engines ({printer.bytes_text(num_bytes)}), {others} not"
    return program.with_notes("; ".join([ways, *reasons]))


def _go_by_copies(start: fx.Node) -> None:
    record = node_meta.bucket(start)
    if record is None or not record.as_rows:
        start.target = ALL_REDUCE_BY_COPIES
        return
    indices = lookup_indices(start.all_input_nodes[0])
    start.target = ALL_REDUCE_ROWS
    start.kwargs = {} if indices is None else {"indices": indices}
