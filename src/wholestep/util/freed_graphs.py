"""freed_graphs(tensors): of which tensors a backward has freed the graph, so that another one would raise an error."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

import torch

from wholestep.util.gradient_node import gradient_node

Name = TypeVar("Name", bound=Hashable)

_FREED = "freed"
"""In the error of torch, which has no other way to say it."""


def freed_graphs(tensors: Mapping[Name, torch.Tensor]) -> frozenset[Name]:
    """The names of the tensors in whose graph a node was, of which a backward has freed what it had saved."""
    known: dict[Any, bool] = {}
    return frozenset(name for name, tensor in tensors.items() if _reaches_freed(gradient_node(tensor), known))


def _reaches_freed(root: Any, known: dict[Any, bool]) -> bool:
    """Whether a node reached from `root` is freed; `known` are answers for single nodes."""
    nodes, stack = {root}, [root]
    while stack:
        node = stack.pop()
        if node is None:
            continue
        if node not in known:
            known[node] = _is_freed(node)
        if known[node]:
            return True
        new = {following for following, _ in node.next_functions} - nodes
        nodes |= new
        stack.extend(new)
    return False


def _is_freed(node: Any) -> bool:
    for name in _saved_names(node.__class__):
        try:
            getattr(node, name)
        except RuntimeError as error:
            if _FREED in str(error):
                return True
    return False


@functools.cache
def _saved_names(kind: type) -> tuple[str, ...]:
    """Attributes of the nodes of a class that give what was saved."""
    return tuple(name for name in dir(kind) if name.startswith("_saved_") or name == "saved_tensors")
