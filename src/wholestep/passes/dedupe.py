"""The same collective of the same value is done once."""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from wholestep.program import edit, meta, ops
from wholestep.program.program import Program


def dedupe(program: Program) -> Program:
    """The program with one collective in the place of several that have the same arguments.

    Placement asks for a value where it is needed, so two readers of one value may both ask. Gradients that
    two parameters share become members of one reduction.
    """
    first: dict[Any, fx.Node] = {}
    dropped = 0
    for node in list(program.graph.nodes):
        if not (ops.is_collective(node) and not ops.mutated_args(node.target)) and node.target is not ops.WAIT:
            continue
        key = (node.target, _frozen(node.args), _frozen(node.kwargs))
        same = first.setdefault(key, node)
        if same is not node:
            _join_buckets(same, node)
            edit.replace_node(node, same)
            dropped += ops.is_collective(same)
    return program.with_notes(f"dropped {dropped} collectives that repeat another one")


def _join_buckets(kept: fx.Node, dropped: fx.Node) -> None:
    one, other = meta.bucket(kept), meta.bucket(dropped)
    if one is not None and other is not None:
        meta.set_bucket(kept, meta.Bucket(one.index, (*one.members, *other.members), one.num_bytes, one.reason))


def _frozen(tree: Any) -> Any:
    """The arguments as something that can be a key."""
    if isinstance(tree, (list, tuple)):
        return tuple(map(_frozen, tree))
    if isinstance(tree, dict):
        return tuple((key, _frozen(tree[key])) for key in sorted(tree))
    return tree
