"""Arguments and results of one tensor call as flat leaves. Plain containers only: it runs once per call of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from wholestep.capture.python import tree_util

Structure = Any
"""None for a leaf, else ``(kind, structures)`` of tuples, lists and slices, ``(dict, keys, structures)`` of a dict.

What a module returns may be of any class that torch's pytrees know, so that is a TreeSpec of theirs.
"""

LEAF: Structure = None


def flatten(value: Any, leaves: list[Any]) -> Structure:
    """Appends the leaves of `value` to `leaves`, from left to right; returns what they stand in."""
    kind = type(value)
    if kind is tuple or kind is list or issubclass(kind, tuple):
        return (kind, tuple([flatten(item, leaves) for item in value]))
    if kind is dict:
        return (dict, tuple(value), tuple([flatten(item, leaves) for item in value.values()]))
    if kind is slice:
        return (slice, tuple([flatten(item, leaves) for item in (value.start, value.stop, value.step)]))
    leaves.append(value)
    return LEAF


def unflatten(structure: Structure, leaves: Iterable[Any]) -> Any:
    """The value again, with other leaves."""
    if isinstance(structure, tree_util.TreeSpec):
        return tree_util.unflatten(list(leaves), structure)
    return _built(structure, iter(leaves).__next__)


def _built(structure: Structure, next_leaf: Callable[[], Any]) -> Any:
    if structure is LEAF:
        return next_leaf()
    kind = structure[0]
    items = [_built(item, next_leaf) for item in structure[-1]]
    if kind is dict:
        return dict(zip(structure[1], items, strict=True))
    return rebuilt(kind, items)


def rebuilt(kind: type, items: list[Any]) -> Any:
    """A container of this class. Named tuples take their items one by one, the results of torch as a list."""
    if kind is list:
        return items
    return kind(*items) if kind is slice or hasattr(kind, "_fields") else kind(items)
