"""Which gathers bring what an input becomes: they may gather into its memory, and nothing is copied at the end."""

from __future__ import annotations

import operator

import torch
import torch.fx as fx

from wholestep.ir import node_meta, op_info
from wholestep.ir.program import InputKind, OutputKind, Program
from wholestep.passes.analysis.alias_analysis import same_layout

_GATHERS = (op_info.c10d.all_gather_into_tensor.default, op_info.c10d.all_gather_into_tensor_coalesced.default)


def gather_targets(program: Program) -> dict[fx.Node, list[fx.Node | None]]:
    """By gather, for each of its shards the input that the whole tensor is written to; None where it is no input.

    Gathers that bring no input at all are left out.
    """
    found: dict[fx.Node, list[fx.Node | None]] = {}
    for output, value in zip(program.outputs, program.results, strict=True):
        if output.kind is not OutputKind.WRITE or output.target is None or not isinstance(value, fx.Node):
            continue
        target = program.placeholders[output.target]
        if value.target is not op_info.WAIT or not same_layout(node_meta.tensor(value), node_meta.tensor(target)):
            continue
        start, item = op_info.waited_for(value), value.args[0]
        if start.target in _GATHERS and isinstance(item, fx.Node):
            place = int(item.args[1]) if item.target is operator.getitem else 0  # type: ignore[arg-type]
            found.setdefault(start, [None] * len(shards_of(start)))[place] = target
    return found


def shards_of(gather: fx.Node) -> list[fx.Node]:
    """What a gather is given: one shard, or those in its list."""
    given = gather.args[0]
    return [given] if isinstance(given, fx.Node) else list(given)  # type: ignore[arg-type]


def is_own_rows(shard: fx.Node, program: Program) -> bool:
    """Whether a shard, which lies in the memory of an input that is whole, is the rows of this rank."""
    ranks = [
        node_meta.value(node)
        for node, record in zip(program.placeholders, program.inputs, strict=True)
        if record.kind is InputKind.RANK
    ]
    part = node_meta.tensor(shard)
    offset = part.storage_offset()
    return (
        part.is_contiguous()
        and isinstance(offset, torch.SymInt)
        and any(offset.node.expr == rank.node.expr * part.numel() for rank in ranks)
    )
