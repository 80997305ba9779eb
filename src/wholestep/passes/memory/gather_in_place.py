"""Gathers into the memory of inputs that are there already, in the place of new tensors that are copied at the end.

Before and after, with a parameter `w` of which a rank updates its own rows::

    own = view(w)[rank]                          own = view(w)[rank]
    update(own)                                  update(own)
    new = wait(all_gather(own))          ->      w' = wait(all_gather_into(own, w))
    WRITE of w: new                              WRITE of w: None (it is already there)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
import torch.fx as fx

from wholestep.ir import graph_edit, node_meta, op_info
from wholestep.ir.ops.collectives import ALL_GATHER_INTO
from wholestep.ir.program import Program
from wholestep.passes.analysis.alias_analysis import Memory
from wholestep.passes.analysis.gather_targets import is_own_rows, shards_of

_aten = torch.ops.aten


def gather_in_place(
    program: Program, memory: Memory, node: fx.Node, targets: Sequence[fx.Node | None], may_write: Callable[..., bool]
) -> set[fx.Node]:
    """Lets a gather write to the inputs that its results are for; gives those inputs.

    Args:
        memory: entered up to the gather.
        targets: by shard, the input; None where there is none.
        may_write: whether an error leaves inputs as they were, if the gather writes to them.
    """
    shards = shards_of(node)

    def fits(own: fx.Node, target: fx.Node | None) -> bool:
        return target is not None and may_write([target], node) and _is_last_reader(program, memory, node, own, target)

    chosen = [target if fits(own, target) else None for own, target in zip(shards, targets, strict=True)]
    if not any(chosen):
        return set()
    size, group = node.args[1:]
    with program.graph.inserting_before(node):
        wholes = [
            target or _new_whole(program.graph, memory, node, own) for own, target in zip(shards, chosen, strict=True)
        ]
        new = program.graph.call_function(ALL_GATHER_INTO, (shards, wholes, size, group))
        node_meta.copy_meta(node, new)
        memory.insert(new, at=node, onto=wholes)
        if isinstance(node.args[0], fx.Node):
            new = graph_edit.emit(program.graph, operator.getitem, new, 0, like=node)
            memory.insert(new, at=node, onto=wholes[0])
    graph_edit.replace_node(node, new)
    return {target for target in chosen if target is not None}


def _is_last_reader(program: Program, memory: Memory, node: fx.Node, shard: fx.Node, target: fx.Node) -> bool:
    """Whether nobody reads the input after the gather, but the gather its own rows."""
    block, position = memory.block(target), memory.position[node]
    if block.constant or block.inputs != [target]:
        return False
    end = max((memory.position[wait] for wait in op_info.waits(node)), default=position)
    later = [value for value in block.values if memory.last_read[value] > position]
    own_rows = shard in block.values and is_own_rows(shard, program)
    return all(own_rows and value is shard and memory.last_read[value] <= end for value in later)


def _new_whole(graph: fx.Graph, memory: Memory, node: fx.Node, shard: fx.Node) -> fx.Node:
    rows, *rest = node_meta.tensor(shard).shape
    made = graph_edit.emit(graph, _aten.new_empty.default, shard, [rows * node.args[1], *rest], like=node)  # type: ignore[operator]
    memory.insert(made, at=node)
    return made
