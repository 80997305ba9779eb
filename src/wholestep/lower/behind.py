"""Passes of ours over what Inductor is about to lower, behind its own and those that the user has given it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


def keep_values(graph: fx.Graph) -> int:
    """Has inputs that are stored elsewhere read before they are overwritten. Gives how many copies that takes.

    Stores stand at the end, as ``copy_``. Inductor takes a ``clone`` for nothing, so that ``t = a.clone();
    a.copy_(b); b.copy_(t)`` becomes ``a.copy_(b); b.copy_(a)``, and both have the values of ``b`` (torch 2.11 to 2.13;
    ``torch.compile`` gives that, too). The copy that is put in here is not taken away again.
    """
    stores: list[fx.Node] = graph.find_nodes(op="call_function", target=aten.copy_.default)
    stores.sort()
    written, num_copies = set[Any](), 0
    for store in stores:
        target, value = store.args[:2]
        if isinstance(value, fx.Node) and _root(value) in written:
            with graph.inserting_before(stores[0]):
                copy = graph.call_function(aten.clone.default, (value,))
            copy.meta.update(value.meta)
            store.replace_input_with(value, copy)
            num_copies += 1
        written.add(target)
    return num_copies


def _root(node: fx.Node) -> fx.Node:
    while ops.is_view(node):
        node = node.all_input_nodes[0]
    return node
