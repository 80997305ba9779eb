"""AllSizes: what one call of torch gives for any sizes of its operands, found out once with symbols in their place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from wholestep.capture.guards.size_guards import SizeConditions
from wholestep.capture.sizes.size_symbols import SMALLEST, SizeEnv
from wholestep.capture.tracing.fake_kernels import LayoutFakeMode
from wholestep.live.sizes.module_sizes import Layout

Call = Callable[[list[Any]], list[Any]]
"""Makes the call with these leaves of arguments; the leaves of what it gives."""


class AllSizes:
    """The sizes of the results of one call, as expressions of those of its operands, and when they are right."""

    def __init__(self, call: Call, leaves: Sequence[Any], moving: Collection[int]) -> None:
        """`leaves`: of the arguments, tensors as `Layout`. `moving` are the places of those with other sizes, and of
        ints that are others, in later calls. Raises whatever a fake kernel may raise for symbols."""
        env = SizeEnv()
        mode = LayoutFakeMode(shape_env=env)
        self._moving = {place: _described(leaves[place]) for place in sorted(moving)}
        given = [
            _symbolic(env, mode, place, self._moving[place], leaf) if place in self._moving else fake(mode, leaf)
            for place, leaf in enumerate(leaves)
        ]
        with mode:
            results = call(given)
        self._layouts: list[Layout | None] = [layout_of(one) for one in results]
        self._conditions = SizeConditions(env)
        numbers = [number for one in self._layouts if one is not None for number in (*one[0], *one[1])]
        self._numbers = self._conditions.evaluator(numbers)

    def results(self, leaves: Sequence[Any]) -> list[Layout | None] | None:
        """The layouts of what the call gives for leaves like these; None where the expressions are not right."""
        sizes: list[int] = []
        strides: list[int] = []
        for place, (shape, _) in self._moving.items():
            now, stride = _described(leaves[place])
            if len(now) != len(shape) or any(a != b for a, b in zip(now, shape, strict=True) if b < SMALLEST):
                return None
            if dims := _dims(shape):
                sizes += [now[dim] for dim in dims]
                strides += stride
        if sizes and self._conditions.why_not(sizes, strides) is not None:
            return None
        numbers = iter(self._numbers(sizes, strides))
        return [
            None if one is None else ([next(numbers) for _ in one[0]], [next(numbers) for _ in one[1]], *one[2:])
            for one in self._layouts
        ]


def fake(mode: Any, leaf: Any) -> Any:
    """A tensor of a layout, of this mode; another leaf as it is."""
    if not isinstance(leaf, tuple):
        return leaf
    shape, strides, dtype, device = leaf
    with mode:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def layout_of(tensor: torch.Tensor | None) -> Layout | None:
    """Of a tensor that a call has given."""
    if tensor is None:
        return None
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device


def _described(leaf: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides; of an int those of a tensor without elements that has it for its size."""
    return (tuple(leaf[0]), tuple(leaf[1])) if isinstance(leaf, tuple) else ((leaf, 0), (1, 1))


def _dims(shape: Sequence[int]) -> list[int]:
    return [dim for dim, size in enumerate(shape) if size >= SMALLEST]


def _symbolic(
    env: SizeEnv, mode: Any, place: int, described: tuple[tuple[int, ...], tuple[int, ...]], leaf: Any
) -> Any:
    shape, strides = described
    is_int = not isinstance(leaf, tuple)
    dims = _dims(shape)
    if not dims:
        return fake(mode, leaf)
    dtype, device = (torch.float32, torch.device("cpu")) if is_int else leaf[2:]
    made = env.fake(mode, fake(mode, (shape, strides, dtype, device)), f"operand.{place}", dims)
    return made.shape[0] if is_int else made
