"""Merges equal collectives, and equal arithmetic on numbers of the host.

An optimizer that goes parameter by parameter computes ``1 - lr * weight_decay`` for each of them. Only plain
Python arithmetic is merged: merging tensor operations would undo activation checkpointing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx

from wholestep.ir import graph_edit, node_meta, op_info
from wholestep.ir.program import Program


def eliminate_common_subexpressions(program: Program) -> Program:
    """The program with equal collectives, and equal host arithmetic, done once.

    Placement asks for a value where it is needed, so two readers of one value may both ask. Gradients that
    two parameters share become members of one reduction. Only collectives to which every rank gives a value that
    counts take part: what a rank gives to a broadcast of another says nothing about what the others get. What placement
    has each phase gather for itself stays so: a value that is gathered again need not live in between.
    """
    first: dict[Any, fx.Node] = {}
    dropped = scalars = 0
    for node in list(program.graph.nodes):
        collective = node.target in op_info.SYMMETRIC or node.target is op_info.WAIT
        if not collective and not _is_arithmetic(node):
            continue
        bucket = node_meta.bucket(node)
        key = (node.target, _frozen(node.args), _frozen(node.kwargs), bucket.phase if bucket is not None else "")
        same = first.setdefault(key, node)
        if same is not node:
            _join_buckets(same, node)
            graph_edit.replace_node(node, same)
            dropped += op_info.is_collective(same)
            scalars += not collective
    return program.with_notes(f"dropped {dropped} collectives and {scalars} host scalars that repeat another one")


def _is_arithmetic(node: fx.Node) -> bool:
    """Whether the node is Python arithmetic on numbers: no tensor goes in or out."""
    if node.op != "call_function" or isinstance(node.target, torch._ops.OpOverload):
        return False
    values = [node_meta.value(node), *(node_meta.value(arg) for arg in node.all_input_nodes)]
    return bool(node.all_input_nodes) and all(isinstance(v, (int, float, torch.SymInt, torch.SymFloat)) for v in values)


def _join_buckets(kept: fx.Node, dropped: fx.Node) -> None:
    one, other = node_meta.bucket(kept), node_meta.bucket(dropped)
    if one is not None and other is not None:
        node_meta.set_bucket(kept, replace(one, members=tuple(dict.fromkeys((*one.members, *other.members)))))


def _frozen(tree: Any) -> Any:
    """The arguments as something that can be a key."""
    if isinstance(tree, (list, tuple)):
        return tuple(map(_frozen, tree))
    if isinstance(tree, dict):
        return tuple((key, _frozen(tree[key])) for key in sorted(tree))
    return tree
