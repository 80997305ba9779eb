"""ModuleSizes: for which sizes of its arguments a capture of a module holds, and the sizes of what it gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from wholestep.capture.bind.captured import Captured, ResultSink
from wholestep.capture.guards.size_guards import SizeGuard
from wholestep.capture.python import tree_util
from wholestep.ir import node_meta

Layout = tuple[Sequence[int], Sequence[int], torch.dtype, torch.device]
"""Shape, strides, dtype and device of a tensor."""
Shape = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides of a tensor among arguments."""


class ModuleSizes:
    """Sizes of arguments and results of one captured call of a module."""

    def __init__(self, captured: Captured, leaves: Sequence[Any]) -> None:
        """`leaves`: of the arguments that were captured."""
        self._arguments = _shapes(leaves)
        self._guard = next((one for one in captured.guards.values if isinstance(one, SizeGuard)), None)
        self._results = _results(captured)
        if self._guard is not None:
            numbers = [number for one in self._results if one is not None for number in (*one[0], *one[1])]
            self._numbers = self._guard.conditions.evaluator(numbers)

    def why_not(self, leaves: Sequence[Any]) -> str | None:
        """Why the capture does not hold for the sizes of these leaves of arguments; None if it does."""
        return self._why_not(_shapes(leaves))

    def covers(self, other: ModuleSizes) -> bool:
        """Whether the capture holds for the sizes that another one was made with."""
        return self._why_not(other._arguments) is None

    def _why_not(self, found: list[Shape | None]) -> str | None:
        moving = {} if self._guard is None else {one.leaf: one.dims for one in self._guard.layouts}
        if len(found) != len(self._arguments) or not all(
            _fits(then, now, moving.get(leaf, ()))
            for leaf, (then, now) in enumerate(zip(self._arguments, found, strict=True))
        ):
            return "its arguments have other shapes"
        return None if self._guard is None else self._guard.conditions.why_not(*self._of(found))

    def results(self, leaves: Sequence[Any]) -> list[Layout | None]:
        """What the module gives for arguments of these sizes, in the order of torch's pytree."""
        if self._guard is None:
            return list(self._results)
        numbers = iter(self._numbers(*self._of(_shapes(leaves))))
        return [
            None if one is None else ([next(numbers) for _ in one[0]], [next(numbers) for _ in one[1]], *one[2:])
            for one in self._results
        ]

    def _of(self, found: list[Shape | None]) -> tuple[list[int], list[int]]:
        """The sizes that move, and the strides of the arguments that have some, as conditions take them."""
        assert self._guard is not None
        given = [(one, shape) for one in self._guard.layouts if (shape := found[one.leaf]) is not None]
        return [shape[0][dim] for one, shape in given for dim in one.dims], [
            one for _, shape in given for one in shape[1]
        ]


def _shapes(leaves: Sequence[Any]) -> list[Shape | None]:
    return [(tuple(one.shape), one.stride()) if isinstance(one, torch.Tensor) else None for one in leaves]


def _fits(then: Shape | None, now: Shape | None, moving: Sequence[int]) -> bool:
    if then is None or now is None:
        return then is now
    if len(then[0]) != len(now[0]) or (not moving and then != now):
        return False
    return all(dim in moving or a == b for dim, (a, b) in enumerate(zip(then[0], now[0], strict=True)))


def _results(captured: Captured) -> list[Layout | None]:
    """The layouts of the results in the order of torch's pytree, with sizes as the trace has them."""
    found: dict[int, Layout] = {}
    for sink, node in zip(
        captured.spec.outputs, captured.program.results, strict=False
    ):  # what it writes comes after them
        assert isinstance(sink, ResultSink)
        tensor = node_meta.tensor(node)
        found[sink.leaf] = (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
    order = tree_util.unflatten(list(range(captured.spec.result_spec.num_leaves)), captured.spec.result_spec)
    return [found.get(leaf) for leaf in pytree.tree_leaves(order)]
