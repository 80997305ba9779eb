"""Arguments and results as flat leaves: pytrees, and plain objects that hold tensors."""

from __future__ import annotations

import dataclasses
import functools
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
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


def _empty(context: Any) -> Any:
    kind, _, is_its_own_dict = context
    if not issubclass(kind, dict):
        return object.__new__(kind)
    made = kind.__new__(kind)
    if is_its_own_dict:
        made.__dict__ = made
    return made


def _filled(made: Any, values: Any, context: Any) -> Any:
    for name, item in zip(context[1], values, strict=True):
        dict.__setitem__(made, name, item) if isinstance(made, dict) else object.__setattr__(made, name, item)
    return made


pytree.register_pytree_node(
    _Opened,
    _flatten_opened,
    lambda values, context: _filled(_empty(context), values, context),
    serialized_type_name="wholestep.capture.python.tree_util._Opened",
)


@dataclasses.dataclass(frozen=True, slots=True)
class _Again:
    """What refers to an object that is taken apart elsewhere in the nest, as a part of a graph does to the whole."""

    number: int
    """Of the object, among all that are taken apart."""
    wrap: Callable[[Any], Any]
    """Makes the reference of the object."""


pytree.register_pytree_node(
    _Again,
    lambda one: ([], (one.number, one.wrap)),
    lambda _, context: _Again(*context),
    serialized_type_name="wholestep.capture.python.tree_util._Again",
)


@dataclasses.dataclass(frozen=True, slots=True)
class _Method:
    """Makes a bound method of an object, also of a callable that is no function."""

    function: Callable[..., Any]

    def __call__(self, thing: Any) -> Any:
        return types.MethodType(self.function, thing)


def _itself(thing: Any) -> Any:
    return thing


def _referred(item: Any) -> tuple[Any, Callable[[Any], Any]]:
    """The object that an item stands for, and what makes such an item of it."""
    if type(item) is weakref.ref:
        return item(), weakref.ref
    if type(item) in weakref.ProxyTypes:
        return behind_proxy(item), weakref.proxy
    if isinstance(item, types.MethodType):
        return item.__self__, _Method(item.__func__)
    return item, _itself


def behind_proxy(thing: Any) -> Any:
    """The object for which a ``weakref.proxy`` stands, None once it is gone. What is no proxy itself."""
    if type(thing) not in weakref.ProxyTypes:
        return thing
    try:
        return thing.__sizeof__.__self__  # a proxy takes methods from the object
    except ReferenceError:
        return None


_NOT_DATA = (types.FunctionType, types.MethodType, types.ModuleType, functools.partial, torch.Generator)


def _fields(thing: Any) -> dict[Any, Any]:
    if isinstance(thing, _NOT_DATA):
        return {}
    if isinstance(thing, dict):
        return dict(thing.items())
    declared = dataclasses.fields(thing) if dataclasses.is_dataclass(thing) else ()
    found = {field.name: getattr(thing, field.name) for field in declared if hasattr(thing, field.name)}
    return found | getattr(thing, "__dict__", {})


_MAX_DEPTH = 100
"""Of objects in objects that are taken apart. What lies deeper is a leaf: nests are walked by functions that recur."""


class _Objects:
    """The plain objects in a nest, and which of them are data: those from which one can come to a tensor.

    Each is looked at once, in whatever way objects hold each other.
    """

    def __init__(self, leaves: list[Any]) -> None:
        self._things: list[tuple[Any, dict[Any, Any]]] = []
        """Those that can be taken apart, as they are met, with what they hold. Their places here are named below."""
        self._places: dict[int, int] = {}
        self._closed: dict[int, Any] = {}
        """By id those that are leaves."""
        self._holders: list[list[int]] = []
        """Of each the places of those that hold it; -1 is the nest itself."""
        self._tensors_at: list[int] = []
        self._references: list[tuple[Any, int]] = []
        """What is held weakly, by a method or a second time, with the place of its holder."""
        self._explore(leaves, -1, 0)
        for thing, holder in self._references:
            if (place := self._places.get(id(thing))) is not None:
                self._holders[place].append(holder)
        data = self._data()
        known = (one for place, one in enumerate(self._things) if place in data)
        self._numbers = {id(thing): number for number, (thing, _) in enumerate(known)}
        self._taken: set[int] = set()
        """Numbers of those that `opened` has taken apart."""

    def _explore(self, leaves: list[Any], holder: int, depth: int) -> None:
        for leaf in leaves:
            if isinstance(leaf, (torch.Tensor, torch.SymFloat)):
                self._tensors_at.append(holder)
            elif not isinstance(leaf, (*CLOSED, type)):
                thing, wrap = _referred(leaf)
                if wrap is not _itself or id(thing) in self._places:
                    self._references.append((thing, holder))
                elif id(thing) not in self._closed:
                    self._enter(thing, holder, depth)

    def _enter(self, thing: Any, holder: int, depth: int) -> None:
        fields = _fields(thing)
        leaves = pytree.tree_leaves(list(fields.values()))
        if not fields or depth == _MAX_DEPTH or any(isinstance(item, (nn.Module, Optimizer)) for item in leaves):
            self._closed[id(thing)] = thing
            return
        place = self._places[id(thing)] = len(self._things)
        self._things.append((thing, fields))
        self._holders.append([holder])
        self._explore(leaves, place, depth + 1)

    def _data(self) -> set[int]:
        found, rest = set[int](), self._tensors_at
        while rest:
            place = rest.pop()
            if place >= 0 and place not in found:
                found.add(place)
                rest += self._holders[place]
        return found

    @property
    def fields(self) -> dict[int, dict[Any, Any]]:
        """By id of the objects that are data what they hold."""
        return {id(thing): fields for thing, fields in self._things if id(thing) in self._numbers}

    def opened(self, tree: Any) -> Any:
        """The nest with `_Opened` in the place of those that are data, where each is met first."""
        leaves, spec = pytree.tree_flatten(tree)
        if all(isinstance(leaf, CLOSED) for leaf in leaves):
            return tree
        return spec.unflatten([self._opened(leaf) for leaf in leaves])

    def _opened(self, leaf: Any) -> Any:
        if isinstance(leaf, (*CLOSED, type)):
            return leaf
        thing, wrap = _referred(leaf)
        number = self._numbers.get(id(thing))
        if number is None:
            return leaf
        if wrap is not _itself or number in self._taken:
            return _Again(number, wrap)
        self._taken.add(number)
        _, fields = self._things[self._places[id(thing)]]
        return _Opened(thing, {name: self.opened(item) for name, item in fields.items()})


def fields_in(tree: Any) -> dict[int, dict[Any, Any]]:
    """By id of the objects that `flatten` takes apart what they hold."""
    return _Objects(pytree.tree_leaves(tree)).fields


def flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Leaves and structure of a nest. Objects that hold tensors are nodes, whatever their class."""
    leaves, spec = pytree.tree_flatten(tree)
    for leaf in leaves:
        if not isinstance(leaf, CLOSED):
            return pytree.tree_flatten(_Objects(leaves).opened(tree))
    return leaves, spec


def unflatten(leaves: list[Any], spec: TreeSpec) -> Any:
    """The nest again. An object is rebuilt field by field, without running its ``__init__``."""
    if not refers(spec):
        return pytree.tree_unflatten(leaves, spec)
    objects = [_empty(node.context) for node in _nodes(spec) if node.type is _Opened]
    return _built(spec, iter(leaves), objects, iter(objects))


def refers(spec: TreeSpec) -> bool:
    """Whether an object in the nest is held more than once."""
    return any(node.type is _Again for node in _nodes(spec))


def _nodes(spec: TreeSpec) -> Iterator[TreeSpec]:
    yield spec
    for child in spec.children():
        yield from _nodes(child)


def _built(spec: TreeSpec, leaves: Iterator[Any], objects: list[Any], empty: Iterator[Any]) -> Any:
    """The nest again, of objects that are there already, so that any of them can refer to any other."""
    if spec.type is None:
        return next(leaves)
    if spec.type is _Again:
        number, wrap = spec.context
        return wrap(objects[number])
    made = next(empty) if spec.type is _Opened else None
    parts = [_built(child, leaves, objects, empty) for child in spec.children()]
    if spec.type is _Opened:
        return _filled(made, parts, spec.context)
    return pytree.SUPPORTED_NODES[spec.type].unflatten_fn(parts, spec.context)


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
    if spec.type is _Again:
        return "an object that stands elsewhere, too"
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
