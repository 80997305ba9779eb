"""Arguments and results as flat leaves: torch's pytrees, and besides them plain objects that hold tensors."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

TreeSpec = pytree.TreeSpec
_CLOSED = (
    torch.Tensor,
    torch.SymFloat,
    torch.SymInt,
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    nn.Module,
    Optimizer,
)


class _Opened:
    """A plain object (a dataclass, a batch class) taken apart into its fields while it is flat."""

    def __init__(self, kind: type, fields: dict[str, Any]) -> None:
        self.kind, self.fields = kind, fields


def _flatten_opened(opened: _Opened) -> tuple[list[Any], Any]:
    return list(opened.fields.values()), (opened.kind, tuple(opened.fields))


def _unflatten_opened(values: Any, context: Any) -> Any:
    kind, names = context
    thing = object.__new__(kind)
    for name, item in zip(names, values, strict=True):
        object.__setattr__(thing, name, item)
    return thing


def _flatten_opened_with_keys(opened: _Opened) -> tuple[list[tuple[Any, Any]], Any]:
    values, context = _flatten_opened(opened)
    return [(pytree.MappingKey(name), item) for name, item in zip(opened.fields, values, strict=True)], context


pytree.register_pytree_node(
    _Opened,
    _flatten_opened,
    _unflatten_opened,
    serialized_type_name="wholestep.capture.tree._Opened",
    flatten_with_keys_fn=_flatten_opened_with_keys,
)


_NOT_DATA = (types.FunctionType, types.MethodType, types.ModuleType, functools.partial, torch.Generator)


def _fields(thing: Any) -> dict[str, Any]:
    if isinstance(thing, _NOT_DATA):
        return {}
    if dataclasses.is_dataclass(thing):
        return {
            field.name: getattr(thing, field.name) for field in dataclasses.fields(thing) if hasattr(thing, field.name)
        }
    return dict(getattr(thing, "__dict__", {}))


def _open(leaf: Any) -> Any:
    if isinstance(leaf, (*_CLOSED, type)):
        return leaf
    fields = _fields(leaf)
    if not fields or any(
        isinstance(item, (nn.Module, Optimizer)) for item in pytree.tree_leaves(list(fields.values()))
    ):
        return leaf
    opened = {name: _open_tree(item) for name, item in fields.items()}
    if not any(isinstance(item, (torch.Tensor, torch.SymFloat)) for item in pytree.tree_leaves(list(opened.values()))):
        return leaf
    return _Opened(type(leaf), opened)


def _open_tree(tree: Any) -> Any:
    leaves, spec = pytree.tree_flatten(tree)
    if all(isinstance(leaf, _CLOSED) for leaf in leaves):
        return tree
    return spec.unflatten([_open(leaf) for leaf in leaves])


def flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Leaves and structure of a nest. Objects that hold tensors are nodes, whatever their class."""
    leaves, spec = pytree.tree_flatten(tree)
    for leaf in leaves:
        if not isinstance(leaf, _CLOSED):
            return pytree.tree_flatten(_open_tree(tree))
    return leaves, spec


def unflatten(leaves: list[Any], spec: TreeSpec) -> Any:
    """The nest again. An object is rebuilt field by field, without running its ``__init__``."""
    return pytree.tree_unflatten(leaves, spec)


def structure(spec: TreeSpec) -> tuple[Any, ...] | None:
    """The nest as tuples (type, parts, keys of a dict); a leaf is ``(None,)``.

    None if it has other nodes than tuples, lists and dicts with names as keys.
    """
    if spec.type is None:
        return (None,)
    parts = tuple(structure(child) for child in spec.children())
    if None in parts or spec.type not in (tuple, list, dict):
        return None
    if spec.type is not dict:
        return (spec.type, parts)
    keys = tuple(spec.context)
    return (dict, parts, keys) if all(type(key) is str for key in keys) else None


def paths(spec: TreeSpec) -> Iterator[tuple[Any, ...]]:
    """Per leaf the keys and indices that lead to it."""
    if spec.type is None:
        yield ()
        return
    children = spec.children()
    for key, child in zip(spec.context if spec.type is dict else range(len(children)), children, strict=True):
        yield from ((key, *rest) for rest in paths(child))


def classes(tree: Any) -> Iterator[type]:
    """The classes of the nodes of a nest: of objects that are taken apart, of named tuples and others."""
    specs = [flatten(tree)[1]]
    while specs:
        spec = specs.pop()
        specs += spec.children()
        kinds = (spec.context[0] if spec.type is _Opened else spec.context, spec.type)
        yield from (kind for kind in kinds if isinstance(kind, type))


def leaves_with_keys(tree: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """Leaves of a nest, each with the keys and indices that lead to it."""
    pairs = pytree.tree_flatten_with_path(_open_tree(tree))[0]
    return [(tuple(getattr(part, "key", getattr(part, "idx", None)) for part in path), leaf) for path, leaf in pairs]
