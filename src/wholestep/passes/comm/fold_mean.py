"""Lets the reduction average gradients, where the backend of the group can.

Before and after, for two ranks::

    mul = aten.mul(flat, 0.5)                        all_reduce = all_reduce(flat, 'avg', group)
    all_reduce = all_reduce(mul, 'sum', group)  ->

NCCL multiplies what a rank gives while it reads it, in the type of the tensor. In float32 and float64 that is what the
multiplication gives, bit by bit; in smaller types only where the number of ranks is a power of two, so that its inverse
loses no digits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.fx as fx

from wholestep.ir import graph_edit, node_meta, op_info
from wholestep.ir.program import Program, Stage

_aten = torch.ops.aten


def fold_mean(program: Program, *, averages: Callable[[str, torch.device], bool]) -> Program:
    """The program with reductions that average in the place of multiplications and sums.

    `averages` says whether the backend of a group, by its name, averages tensors of a device. The note says how many
    reductions do and how many bytes are not read and written for it.
    """
    if program.stage is Stage.SCHEDULED:
        return program
    sizes = {axis.group: axis.size for axis in program.mesh}
    count = saved_bytes = 0
    for start in program.graph.find_nodes(op="call_function", target=op_info.c10d.all_reduce.default):
        scaled, op, group = start.args
        if op != "sum" or not _is_mean(scaled, sizes.get(group, 1)):
            continue
        if not averages(group, node_meta.tensor(scaled).device):
            continue
        start.args = (scaled.args[0], "avg", group)
        count, saved_bytes = count + 1, saved_bytes + 2 * node_meta.num_bytes(scaled)
    if not count:
        return program
    graph_edit.remove_dead_code(program.graph)
    return program.with_notes(f"{count} reductions average on the way: {saved_bytes:,} B less are read and written")


def _is_mean(scaled: fx.Node, size: int) -> bool:
    """Whether the node divides a tensor by the number of ranks, for the reduction alone."""
    if size < 2 or len(scaled.users) != 1 or scaled.kwargs or len(scaled.args) != 2:
        return False
    flat, factor = scaled.args
    inverse = {_aten.mul.Tensor: 1 / size, _aten.div.Tensor: size}.get(scaled.target)  # type: ignore[call-overload]
    if inverse is None or factor != inverse or isinstance(factor, fx.Node):
        return False
    dtype = node_meta.tensor(scaled).dtype
    exact = dtype in (torch.float32, torch.float64) or (dtype.is_floating_point and size & (size - 1) == 0)
    return exact and isinstance(flat, fx.Node) and node_meta.tensor(flat).dtype is dtype
