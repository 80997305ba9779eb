"""Which sources each item of a list comes from, through foreach and fused operators."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.fx as fx

from wholestep.ir import graph_edit, node_meta, op_info

Masks = int | list[Any]
"""Of a tensor: the sources it comes from, a bit each. Of a list: those of its items."""


def follow(graph: fx.Graph, sources: Mapping[fx.Node, int], *, scalars: bool) -> dict[fx.Node, Masks]:
    """For every node, the bits of the sources that its value comes from; lists item by item.

    Args:
        sources: nodes with bits of their own.
        scalars: whether an operator passes on what its scalar arguments come from (a clipping factor). If not, an item
            belongs to the items with its index alone, and a tensor to the arguments with as many elements.
    """
    masks: dict[fx.Node, Masks] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        if node.op == "call_function" and node.target is operator.getitem:
            inner = masks[node.args[0]]
            masks[node] = inner[node.args[1]] if isinstance(inner, list) else inner
        elif node.op == "call_function" and op_info.is_indexwise(node.target):
            masks[node] = _indexwise(node, masks, scalars=scalars)
        else:
            value = node_meta.value(node)
            mask = _of_nodes(node.all_input_nodes if scalars else _of_its_size(node, value), masks)
            masks[node] = [mask] * len(value) if isinstance(value, (list, tuple)) else mask
        if node in sources:
            masks[node] = _add(masks[node], sources[node])
    return masks


def several(node: fx.Node) -> bool:
    """Whether a call gives several lists, and not one."""
    return len(node.target._schema.returns) > 1  # type: ignore[union-attr]


def length(node: fx.Node) -> int:
    """How many tensors are in each list of an indexwise call."""
    value = node_meta.value(node)
    return len(value[0] if several(node) else value)


def items(node: fx.Node) -> Iterator[tuple[int, int, fx.Node]]:
    """The items that are read out of a call's lists: (number of the list, index in it, node)."""
    for user in list(node.users):
        if not several(node):
            yield 0, _index(user), user
            continue
        for item in list(user.users):
            yield _index(user), _index(item), item


def only_items(node: fx.Node) -> bool:
    """Whether the lists are read item by item and in no other way."""
    level = [node]
    for _ in range(2 if several(node) else 1):
        level = [user for one in level for user in one.users]
        if any(user.target is not operator.getitem or not isinstance(user.args[1], int) for user in level):
            return False
    return True


def joined(masks: Masks) -> int:
    """The bits of a tensor, or those of all items."""
    if isinstance(masks, int):
        return masks
    mask = 0
    for one in masks:
        mask |= joined(one)
    return mask


def _index(item: fx.Node) -> int:
    return int(item.args[1])  # type: ignore[arg-type]


def _indexwise(node: fx.Node, masks: Mapping[fx.Node, Masks], *, scalars: bool) -> list[Any]:
    count = length(node)
    given = [*node.args, *node.kwargs.values()]
    lists = [one for one in given if isinstance(one, (list, tuple)) and len(one) == count]
    rest = [one for one in given if not any(one is other for other in lists)] if scalars else []
    common = _of_nodes(graph_edit.nodes_of(rest), masks)
    each = [common | _of_nodes(graph_edit.nodes_of([one[index] for one in lists]), masks) for index in range(count)]
    return [each] * len(node.target._schema.returns) if several(node) else each  # type: ignore[union-attr]


def _of_its_size(node: fx.Node, value: Any) -> list[fx.Node]:
    """The arguments with as many elements as the result; all of them if there are none."""
    size = _num_elements(value)
    alike = [arg for arg in node.all_input_nodes if size is not None and _num_elements(node_meta.value(arg)) == size]
    return alike or node.all_input_nodes


def _num_elements(value: Any) -> int | None:
    """Of a tensor whose size is known; else None."""
    size = value.numel() if isinstance(value, torch.Tensor) else None
    return size if isinstance(size, int) else None


def _of_nodes(nodes: Any, masks: Mapping[fx.Node, Masks]) -> int:
    mask = 0
    for node in nodes:
        mask |= joined(masks[node])
    return mask


def _add(masks: Masks, bit: int) -> Masks:
    return masks | bit if isinstance(masks, int) else [_add(one, bit) for one in masks]
