"""Splits optimizer calls on all parameters into one per bucket.

Before and after, for parameters a, b in bucket 0 and c in bucket 1::

    norms = _foreach_norm([a', b', c'])            norms_0 = _foreach_norm([a', b'])      # as soon as bucket 0 is there
    updated = _fused_adamw([a, b, c], ...)   ->    norms_1 = _foreach_norm([c'])
                                                   updated_0 = _fused_adamw([a, b], ...)
                                                   updated_1 = _fused_adamw([c], ...)

Every index of such a call is on its own, so the numbers are the same bits. A norm over all gradients is made of the
norms of single gradients, which the split gives bucket by bucket; what joins them stays. Temporary lists are as large
as one bucket instead of all parameters, and the gradients of a bucket are free once it is updated.
Source of updating within the backward: Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited
Resources" (LOMO), 2023, which does it parameter by parameter from a hook.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from wholestep.ir import graph_edit, node_meta, op_info
from wholestep.ir.program import Program
from wholestep.passes.analysis import foreach_items
from wholestep.passes.analysis.foreach_items import Masks


def split_optimizer(program: Program) -> Program:
    """The program with foreach and fused optimizer calls split by bucket."""
    starts = [node for node in program.graph.nodes if op_info.is_collective(node) and node_meta.brings_gradients(node)]
    if len(starts) < 2:
        return program
    sources = {wait: 1 << number for number, start in enumerate(starts) for wait in op_info.waits(start)}
    owners = _owners(program.graph, sources)
    calls = parts = 0
    for node, owner in owners.items():
        if len(set(owner)) > 1 and foreach_items.only_items(node):
            calls += 1
            parts += _split(program.graph, node, owner)
    return program.with_notes(f"{calls} calls on lists of parameters are {parts} now, one per bucket")


def _owners(graph: fx.Graph, sources: dict[fx.Node, int]) -> dict[fx.Node, list[int]]:
    """By indexwise call, the bucket that each index belongs to: the last one it needs.

    What needs none (weight decay, counters) belongs to the bucket of what reads it.
    """
    masks = foreach_items.follow(graph, sources, scalars=False)
    owners: dict[fx.Node, list[int]] = {}
    for node in reversed(graph.nodes):
        if node.op != "call_function" or not op_info.is_indexwise(node.target):
            continue
        own = [mask.bit_length() - 1 for mask in _flat(masks[node], node)]
        for _, index, item in foreach_items.items(node) if -1 in own else ():
            owner = _first_owner(item, owners, masks)
            if owner >= 0 and masks_at(masks[node], node, index) == 0:
                own[index] = owner if own[index] < 0 else min(own[index], owner)
        owners[node] = own
    ordered = [node for node in graph.nodes if node in owners]
    return {node: owners[node] for node in ordered}


def _flat(masks: Masks, node: fx.Node) -> list[int]:
    return [masks_at(masks, node, index) for index in range(foreach_items.length(node))]


def masks_at(masks: Masks, node: fx.Node, index: int) -> int:
    """The bits of one index of an indexwise call."""
    assert isinstance(masks, list)
    found = masks[0][index] if foreach_items.several(node) else masks[index]
    assert isinstance(found, int)
    return found


def _first_owner(node: fx.Node, owners: dict[fx.Node, list[int]], masks: dict[fx.Node, Masks]) -> int:
    """The first bucket that a reader of an item belongs to; -1 if none does."""
    found = []
    for user in node.users:
        if user in owners:
            found += [owners[user][at] for at in _places(user, node)]
        elif user.op != "output" and isinstance(masks[user], int):
            found.append(int(masks[user]).bit_length() - 1)  # type: ignore[arg-type]
    return min((owner for owner in found if owner >= 0), default=-1)


def _places(user: fx.Node, node: fx.Node) -> list[int]:
    lists = [arg for arg in (*user.args, *user.kwargs.values()) if isinstance(arg, (list, tuple))]
    return [at for one in lists for at, other in enumerate(one) if other is node and at < foreach_items.length(user)]


def _split(graph: fx.Graph, node: fx.Node, owner: Sequence[int]) -> int:
    """Replaces the call by one per owner. Gives how many those are."""
    count = foreach_items.length(node)
    several = foreach_items.several(node)
    new_item: dict[tuple[int, int], fx.Node] = {}
    wanted = {(result, index) for result, index, _ in foreach_items.items(node)}
    groups = sorted(set(owner))
    with graph.inserting_before(node):
        for group in groups:
            chosen = [index for index in range(count) if owner[index] == group]
            part = graph.call_function(
                node.target,  # type: ignore[arg-type]
                tuple(_chosen(arg, chosen, count) for arg in node.args),
                {key: _chosen(arg, chosen, count) for key, arg in node.kwargs.items()},
            )
            node_meta.copy_meta(node, part)
            value = node_meta.value(node)
            lists = [[one[index] for index in chosen] if one else [] for one in (value if several else [value])]
            node_meta.set_value(part, tuple(lists) if several else lists[0])
            for result in range(len(lists)):
                if not any((result, index) in wanted for index in chosen):
                    continue
                taken = _item(graph, part, result, node) if several else part
                for place, index in enumerate(chosen):
                    if (result, index) in wanted:
                        new_item[result, index] = _item(graph, taken, place, node)
    graph_edit.replace_nodes({item: new_item[result, index] for result, index, item in foreach_items.items(node)})
    for user in list(node.users):
        graph.erase_node(user)
    graph.erase_node(node)
    return len(groups)


def _item(graph: fx.Graph, source: fx.Node, index: int, like: fx.Node) -> fx.Node:
    return graph_edit.emit(graph, operator.getitem, source, index, like=like)


def _chosen(arg: Any, chosen: Sequence[int], count: int) -> Any:
    """The part of an argument: of a list with an entry per index, those chosen; else all of it."""
    if isinstance(arg, (list, tuple)) and len(arg) == count and not isinstance(arg, torch.Size):
        return [arg[index] for index in chosen]
    return arg
