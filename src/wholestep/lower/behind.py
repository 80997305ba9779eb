"""Passes of ours over what Inductor is about to lower, behind its own and those that the user has given it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.fx as fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from wholestep.program import ops

aten = torch.ops.aten

GraphPass = Callable[[fx.Graph], object]


class Behind(CustomGraphPass):
    """What stands in the option ``post_grad_custom_post_pass`` of Inductor."""

    def __init__(self, others: Any, own: Mapping[object, GraphPass]) -> None:
        """`others`: what the user has put there: one pass, several, or None. `own`: ours, by what Inductor's cache is
        to know them by."""
        self._others: list[Any] = list(others) if isinstance(others, (list, tuple)) else [others] if others else []
        self._own = own

    def __call__(self, graph: fx.Graph) -> None:
        """See the class."""
        for one in (*self._others, *self._own.values()):
            one(graph)

    def uuid(self) -> object | None:
        """What Inductor's cache knows this pass by. None, so that it keeps nothing, where one of the user's has no
        name."""
        names = [one.uuid() if isinstance(one, CustomGraphPass) else None for one in self._others]
        return None if None in names else (*self._own, *names)


_IN_PLACE = {
    *(getattr(aten, f"{name}_scatter").default for name in ("select", "slice", "diagonal", "as_strided")),
    aten.index_put.default, aten._unsafe_index_put.default,
}  # fmt: skip
"""Calls that Inductor has write to their first argument, where that is an input that is stored to at the end."""


def keep_values(graph: fx.Graph) -> int:
    """Has inputs that are stored to keep their values as long as those are wanted. Gives how many copies that takes.

    Stores stand at the end, as ``copy_``. What ``torch.compile`` of torch 2.11 to 2.13 does with them is wrong twice:

    - A ``clone`` is nothing, so that ``t = a.clone(); a.copy_(b); b.copy_(t)`` becomes ``a.copy_(b); b.copy_(a)``, and
      both have the values of ``b``.
    - What changes a part of an input writes to the input, whose values the step overwrites anyway; so ``t = a.clone();
      t[0] = 0; a.copy_(b); return t`` returns the values of ``b``.

    Copies that are put in here are not taken away again.
    """
    stores: list[fx.Node] = graph.find_nodes(op="call_function", target=aten.copy_.default)
    if not stores:
        return 0
    stores.sort()
    targets, ends = {store.args[0] for store in stores}, {*map(_root, graph.output_node().all_input_nodes)}
    stored: dict[Any, Any] = {store.args[0]: store.args[1] for store in stores}
    copies = []
    for node in list(graph.nodes):
        if node.target in _IN_PLACE and _root(node.args[0]) in targets and not _is_stored(node, stored, ends):
            copies.append(_copied(node, node.args[0], before=node))
    written = set[Any]()
    for store in stores:
        target, value = store.args[:2]
        if isinstance(value, fx.Node) and _root(value) in written:
            copies.append(_copied(store, value, before=stores[0]))
        written.add(target)
    return len(copies)


def _is_stored(node: fx.Node, stored: Mapping[Any, Any], ends: Collection[fx.Node]) -> bool:
    """Whether what a call makes of an input is what is stored there in the end, and is nobody's else."""
    value = stored.get(node.args[0])
    while isinstance(value, fx.Node) and value.target in _IN_PLACE and value not in ends:
        if value is node:
            return True
        value = value.args[0]
    return False


def _copied(reader: fx.Node, value: fx.Node, before: fx.Node) -> fx.Node:
    """Has a node read a copy of a value."""
    with reader.graph.inserting_before(before):
        copy = reader.graph.call_function(aten.clone.default, (value,))
    copy.meta.update(value.meta)
    reader.replace_input_with(value, copy)
    return copy


def _root(node: fx.Node) -> fx.Node:
    while ops.is_view(node):
        node = node.all_input_nodes[0]
    return node
