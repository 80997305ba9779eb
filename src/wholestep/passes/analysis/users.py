"""Who reads a value through views of it, and what a view is a view of."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch.fx as fx

from wholestep.ir import op_info

IsView = Callable[[fx.Node], bool]
"""Which nodes count as views; each is one of its first argument."""


def readers_through_views(node: fx.Node, is_view: IsView = op_info.is_view) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Readers of a value or of views of it, each with the node that it reads."""
    for user in node.users:
        if is_view(user):
            yield from readers_through_views(user, is_view)
        else:
            yield user, node


def view_chain(node: fx.Node, is_view: IsView = op_info.is_view) -> Iterator[fx.Node]:
    """The node, what it is a view of, what that is a view of, and so on to what is no view."""
    yield node
    while is_view(node):
        node = node.all_input_nodes[0]
        yield node


def base(node: fx.Node) -> fx.Node:
    """What a node is a view of in the end; the node itself if it is no view."""
    *_, found = view_chain(node)
    return found
