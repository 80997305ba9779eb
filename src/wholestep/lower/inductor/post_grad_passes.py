"""Passes of ours over what Inductor is about to lower, after its own and those that the user has given it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.fx as fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from wholestep.ir import op_info
from wholestep.lower.inductor import war_order

aten = torch.ops.aten

GraphPass = Callable[[fx.Graph], object]


class PostGradPasses(CustomGraphPass):
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
        return None if None in names else (get_hash_for_files((__file__, war_order.__file__)), *self._own, *names)


_BY_INDEX = {aten.index_put.default, aten._unsafe_index_put.default}
"""Calls that Inductor has write to their first argument, also where that is a value that nobody reads later, and that
compute what they write on the way."""
_IN_PLACE = _BY_INDEX.union(
    getattr(aten, f"{name}_scatter").default for name in ("select", "slice", "diagonal", "as_strided")
)
"""Calls that Inductor has write to their first argument, where that is an input that is stored to at the end."""
_ELSEWHERE = frozenset({"flip", "roll", "index", "index_select", "gather", "cat", "constant_pad_nd", "embedding"})
"""Calls, besides views and those above, that Inductor computes where they are read, from other places of what they
read."""


def keep_values(graph: fx.Graph) -> int:
    """Has what is written to keep its values as long as those are wanted. Gives how many copies that takes.

    Stores of inputs stand at the end, as ``copy_``. Inductor of torch 2.11 and 2.13 loses values there, the first four
    under ``torch.compile``, too (seen with 2.13, the first and third with 2.11 as well):

    - A ``clone`` is nothing, so that ``t = a.clone(); a.copy_(b); b.copy_(t)`` becomes ``a.copy_(b); b.copy_(a)``, and
      both have the values of ``b``.
    - What changes a part of an input writes to the input, whose values the step overwrites anyway; so ``t = a.clone();
      t[0] = 0; a.copy_(b); return t`` returns the values of ``b``.
    - What writes by an index reads other places of the same tensor, be it an input or not, while it does:
      ``a[[1, 3]] = a[:2].clone()``.
    - A call on lists writes to its tensors in turn, whatever is stored to them; what a later one reads has changed.
    - What is returned of an input as it was, ``a.t().clone()``, is the input itself, with what is stored to it.

    Copies that are put in here are not taken away again.
    """
    stores: list[fx.Node] = graph.find_nodes(op="call_function", target=aten.copy_.default)
    stores.sort()
    return _Keeper(graph, stores).keep()


class _Keeper:
    def __init__(self, graph: fx.Graph, stores: Sequence[fx.Node]) -> None:
        self._graph, self._stores, self._num_copies = graph, stores, 0
        self._stored: dict[Any, Any] = {store.args[0]: store.args[1] for store in stores}
        self._ends = {*map(_root, graph.output_node().all_input_nodes)}

    def keep(self) -> int:
        for node in list(self._graph.nodes):
            if node.target in _IN_PLACE and _root(node.args[0]) in self._stored and not self._is_stored(node):
                node.replace_input_with(node.args[0], self._copy(node.args[0], before=node))
            elif op_info.is_indexwise(node.target) and not self._may_be_in_place(node):
                own: Any = node.args[0]
                copied = [self._copy(one, before=node) if _root(one) in self._stored else one for one in own]
                node.args = (copied, *node.args[1:])
            if node.target in _BY_INDEX:
                rest = fx.map_arg(node.args[1:], partial(self._apart, base=_base(node.args[0]), before=node))
                node.args = (node.args[0], *rest)
        written = set[Any]()
        for store in self._stores:
            target, value = store.args[:2]
            if isinstance(value, fx.Node) and _root(value) in written:
                store.replace_input_with(value, self._copy(value, before=self._stores[0]))
            written.add(target)
        end = self._graph.output_node()
        for value in end.all_input_nodes:
            if _root(value) in self._stored:
                end.replace_input_with(value, self._copy(value, before=self._stores[0]))
        return self._num_copies

    def _copy(self, value: Any, before: fx.Node) -> fx.Node:
        with self._graph.inserting_before(before):
            copy = self._graph.call_function(aten.clone.default, (value,))
        copy.meta.update(value.meta)
        self._num_copies += 1
        return copy

    def _apart(self, value: fx.Node, base: fx.Node, before: fx.Node) -> fx.Node:
        """A value, or a copy of it where it lies in what is about to be written to."""
        return self._copy(value, before) if _base(value) is base else value

    def _is_stored(self, node: fx.Node) -> bool:
        """Whether what a call makes of an input is what is stored there in the end, and is nobody's else."""
        value = self._stored.get(node.args[0])
        while isinstance(value, fx.Node) and value.target in _IN_PLACE and value not in self._ends:
            if value is node:
                return True
            value = value.args[0]
        return False

    def _may_be_in_place(self, call: fx.Node) -> bool:
        """Whether a call on lists may write to the tensors of its first one in turn, as far as they are stored to."""
        own: Any = call.args[0] if call.args and isinstance(call.args[0], (list, tuple)) else ()
        places = {one: place for place, one in enumerate(own) if one in self._stored}
        if any(one not in places and _root(one) in self._stored for one in own):
            return False
        items = {node.args[1]: node for node in call.users if node.target is operator.getitem}
        for one, place in places.items():
            if self._stored[one] is not items.get(place) or items[place] in self._ends:
                return False
        rest = [*call.args[1:], *call.kwargs.values()]
        return not any(
            read in places and (places[read] != place or not straight)
            for place in range(len(own))
            for read, straight in self._read([_at(arg, place) for arg in rest])
        )

    def _read(self, values: Iterable[Any]) -> set[tuple[fx.Node, bool]]:
        """The inputs that are read where values are, and whether only at the same place: Inductor computes what is
        cheap where it is read."""
        todo, seen = [(value, True) for value in values], set[tuple[Any, bool]]()
        while todo:
            value, straight = todo.pop()
            if not isinstance(value, fx.Node) or (value, straight) in seen:
                continue
            seen.add((value, straight))
            if value.target is operator.getitem and op_info.is_indexwise(value.args[0].target):  # type: ignore[union-attr]
                call, place = value.args
                todo += [(_at(arg, place), straight) for arg in (*call.args, *call.kwargs.values())]  # type: ignore[union-attr]
            elif value.op == "call_function" and (straight_on := _goes_on(value)) is not None:
                todo += [(one, straight and straight_on) for one in value.all_input_nodes]
        return {(value, straight) for value, straight in seen if value.op == "placeholder"}


def _at(arg: Any, place: Any) -> Any:
    """What of an argument belongs to one place of a list."""
    return arg[place] if isinstance(arg, (list, tuple)) and place < len(arg) else arg


def _goes_on(node: fx.Node) -> bool | None:
    """Whether a call may be computed where it is read, from the same place of what it reads (True) or from others."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    name = node.target._schema.name.removeprefix("aten::")
    if op_info.is_view(node) or node.target in _IN_PLACE or name in _ELSEWHERE:
        return False
    return True if torch.Tag.pointwise in node.target.tags or name in ("clone", "copy") else None


def _base(node: Any) -> Any:
    """What a value lies in if all that may write in place do."""
    while (root := _root(node)) is not node or (isinstance(node, fx.Node) and node.target in _IN_PLACE):
        node = root if root is not node else node.args[0]
    return node


def _root(node: Any) -> Any:
    while isinstance(node, fx.Node) and op_info.is_view(node):
        node = node.all_input_nodes[0]
    return node
