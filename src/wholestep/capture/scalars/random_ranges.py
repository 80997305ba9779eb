"""Ranges of uniform random numbers, known before they are drawn.

``torch.rand`` gives numbers of at least 0 and less than 1, so ``torch.rand([]) < 0.0`` is false whatever is drawn.
Models skip layers this way and ask in every layer, also where the probability to skip one is 0. The draw stays in
the graph, so the next number of the generator is the one that eager code draws; Python is given the answer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

from wholestep.ir import op_info

aten = torch.ops.aten

_SMALLEST = 2.0**-24
"""The least positive number of the types that are drawn: one nearer to 0 is taken for 0 by a comparison with them."""


def _below(number: float) -> bool | None:
    """Whether a draw is less than `number`; None where that is not known before the draw."""
    return True if number >= 1 else False if number <= 0 else None


def _at_most(number: float) -> bool | None:
    return True if number >= 1 else False if number <= -_SMALLEST else None


def _equal(number: float) -> bool | None:
    return False if number >= 1 or number <= -_SMALLEST else None


def _not(answer: Callable[[float], bool | None]) -> Callable[[float], bool | None]:
    def opposite(number: float) -> bool | None:
        known = answer(number)
        return None if known is None else not known

    return opposite


_ANSWERS: dict[Any, Callable[[float], bool | None]] = {
    aten.lt.Scalar: _below,
    aten.ge.Scalar: _not(_below),
    aten.le.Scalar: _at_most,
    aten.gt.Scalar: _not(_at_most),
    aten.eq.Scalar: _equal,
    aten.ne.Scalar: _not(_equal),
    operator.lt: _below,
    operator.ge: _not(_below),
    operator.le: _at_most,
    operator.gt: _not(_at_most),
    operator.eq: _equal,
    operator.ne: _not(_equal),
}
"""Comparison of draws with a number -> its answer. Python puts the number on the right, torch's as well as its own."""

_DRAWS = frozenset({aten.rand, aten.rand_like})
_PARTS = frozenset({
    aten.select.int, aten.slice.Tensor, aten.view.default, aten._unsafe_view.default, aten.detach.default,
    aten.alias.default, aten.squeeze.default, aten.squeeze.dim, aten.unsqueeze.default, aten.unbind.int,
    operator.getitem, aten._local_scalar_dense.default,
})  # fmt: skip
"""What gives some of the numbers of its argument, as they are."""


def answer(node: fx.Node) -> bool | None:
    """The answer of a comparison of uniform draws with a number of Python's; None where it is not certain."""
    return _ANSWERS[node.target](node.args[1]) if _compares(node) else None  # type: ignore[arg-type]


def by_chance(node: fx.Node) -> bool:
    """Whether a truth value, or what it was made of by one-argument calls, compares a draw with a number."""
    while not _compares(node):
        if len(node.all_input_nodes) != 1:
            return False
        node = node.all_input_nodes[0]
    return True


def _compares(node: fx.Node) -> bool:
    """Whether a node compares draws with a number of Python's."""
    if node.op != "call_function" or node.target not in _ANSWERS or len(node.args) != 2:
        return False
    drawn, number = node.args
    return isinstance(drawn, fx.Node) and isinstance(number, (int, float)) and _is_drawn(drawn)


def _is_drawn(node: fx.Node) -> bool:
    """Whether a node holds numbers of a uniform draw, and nothing that was written over them."""
    while node.target in _PARTS:
        node = node.all_input_nodes[0]
    packet = getattr(node.target, "overloadpacket", None)
    return packet in _DRAWS and not op_info.mutated_args(node.target) and not is_written(node)


def is_written(node: fx.Node, before: fx.Node | None = None) -> bool:
    """Whether the graph as it is so far writes to the memory of a node, through whatever view of it.

    With `before`, only what stands before that node counts.
    """
    for user in node.users:
        if before is not None and not user < before:
            continue
        if any(node in op_info.argument_nodes(user, [place]) for place in op_info.mutated_args(user.target)):
            return True
        if (op_info.viewed_args(user.target) or user.target is operator.getitem) and is_written(user, before):
            return True
    return False
