"""Arguments and results as flat leaves: pytrees, and plain objects that hold tensors."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

TreeSpec = pytree.TreeSpec
SCALARS = (torch.SymFloat, torch.SymInt, torch.SymBool, bool, int, float, complex, str, bytes, type(None))
CLOSED = (torch.Tensor, *SCALARS, nn.Module, Optimizer)
"""Kinds of leaves."""


class _Opened:
    """A plain object (a dataclass, a batch class, a dict of a class of its own) taken apart while it is flat."""

    def __init__(self, thing: Any, fields: dict[Any, Any]) -> None:
        self.kind, self.fields = type(thing), fields
        self.is_its_own_dict = getattr(thing, "__dict__", None) is thing
        """``self.__dict__ = self``, so that keys are attributes, too."""


def _flatten_opened(opened: _Opened) -> tuple[list[Any], Any]:
    return list(opened.fields.values()), (opened.kind, tuple(opened.fields), opened.is_its_own_dict)


def _unflatten_opened(values: Any, context: Any) -> Any:
    kind, names, is_its_own_dict = context
    if issubclass(kind, dict):
        made = kind.__new__(kind)
        dict.update(made, zip(names, values, strict=True))
        if is_its_own_dict:
            made.__dict__ = made
        return made
    thing = object.__new__(kind)
    for name, item in zip(names, values, strict=True):
        object.__setattr__(thing, name, item)
    return thing


pytree.register_pytree_node(
    _Opened,
    _flatten_opened,
    _unflatten_opened,
    serialized_type_name="wholestep.capture.python.tree_util._Opened",
)


_NOT_DATA = (types.FunctionType, types.MethodType, types.ModuleType, functools.partial, torch.Generator)


def _fields(thing: Any) -> dict[Any, Any]:
    if isinstance(thing, _NOT_DATA):
        return {}
    if isinstance(thing, dict):
        return dict(thing.items())
    declared = dataclasses.fields(thing) if dataclasses.is_dataclass(thing) else ()
    found = {field.name: getattr(thing, field.name) for field in declared if hasattr(thing, field.name)}
    return found | getattr(thing, "__dict__", {})


def _open(leaf: Any, around: frozenset[int]) -> Any:
    """`around`: what the leaf lies in, by id, as objects may hold each other."""
    if isinstance(leaf, (*CLOSED, type)) or id(leaf) in around:
        return leaf
    fields = _fields(leaf)
    if not fields or any(
        isinstance(item, (nn.Module, Optimizer)) for item in pytree.tree_leaves(list(fields.values()))
    ):
        return leaf
    opened = {name: _open_tree(item, around | {id(leaf)}) for name, item in fields.items()}
    if not any(isinstance(item, (torch.Tensor, torch.SymFloat)) for item in pytree.tree_leaves(list(opened.values()))):
        return leaf
    return _Opened(leaf, opened)


def fields_of(thing: Any) -> dict[Any, Any] | None:
    """The fields of an object that `flatten` takes apart; None if it is a leaf."""
    return _fields(thing) if isinstance(_open(thing, frozenset()), _Opened) else None


def _open_tree(tree: Any, around: frozenset[int] = frozenset()) -> Any:
    leaves, spec = pytree.tree_flatten(tree)
    if all(isinstance(leaf, CLOSED) for leaf in leaves):
        return tree
    return spec.unflatten([_open(leaf, around) for leaf in leaves])


def flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Leaves and structure of a nest. Objects that hold tensors are nodes, whatever their class."""
    leaves, spec = pytree.tree_flatten(tree)
    for leaf in leaves:
        if not isinstance(leaf, CLOSED):
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
    """Per leaf the keys, indices and names of fields that lead to it."""
    if spec.type is None:
        yield ()
        return
    for key, child in zip(_keys(spec), spec.children(), strict=True):
        yield from ((key, *rest) for rest in paths(child))


def _keys(spec: TreeSpec) -> Sequence[Any]:
    """Under what the children of a node stand. Classes that say themselves how they are taken apart number them."""
    if spec.type is None:
        return ()
    if spec.type in (dict, OrderedDict):
        return list(spec.context)
    if spec.type in (defaultdict, _Opened):
        return list(spec.context[1])
    return range(len(spec.children()))


def difference(then: TreeSpec, now: TreeSpec, way: tuple[Any, ...] = ()) -> tuple[tuple[Any, ...], str, str]:
    """The way to the first node in which two structures differ, and what it is in each."""
    keys, others = list(_keys(then)), list(_keys(now))
    if _kind(then) is not _kind(now) or keys != others:
        return way, _described(then), _described(now)
    parts = zip(keys, then.children(), now.children(), strict=True)
    different = ((key, one, other) for key, one, other in parts if one != other)
    found = next(different, None)
    return (way, _described(then), _described(now)) if found is None else difference(*found[1:], (*way, found[0]))


def _kind(spec: TreeSpec) -> Any:
    return spec.context[0] if spec.type is _Opened else spec.type


def _described(spec: TreeSpec) -> str:
    if spec.type is None:
        return "one value"
    what = f"a {_kind(spec).__name__}"
    keys = _keys(spec)
    return (
        f"{what} of {len(keys)}"
        if isinstance(keys, range)
        else f"{what} with {', '.join(map(repr, keys)) or 'nothing'}"
    )


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
    leaves, spec = flatten(tree)
    return list(zip(paths(spec), leaves, strict=True))
