"""Sizes that move between calls: how records name them, what they were, and comparisons that decide nothing.

[Note: no question after a capture]
A symbolic size answers every question of Python (``==``, ``<``, ``bool``, ``int``) by the number that it was in the
traced call, and torch notes the answer as a condition of the trace. Calls are checked for all of them, whenever they
were asked. A pass that asks one would so tie the program to more sizes than the step does: it asks the functions of
this file, which answer from expressions alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true


@dataclass(frozen=True, slots=True, repr=False)
class Size:
    """A dim of an input that moves between calls: its size is read of the input when the graph runs."""

    input: str
    """Name of the input."""
    dim: int
    hint: int = field(compare=False)
    """What it was in the traced call. Costs are predicted with it, and nothing else depends on it."""

    def __repr__(self) -> str:
        return f"{self.input}.shape[{self.dim}]"


@dataclass(frozen=True, slots=True, repr=False)
class Stride:
    """A stride of an input that no sizes of it give, as of a slice of a larger tensor; it moves between calls too."""

    input: str
    dim: int
    hint: int = field(compare=False)

    def __repr__(self) -> str:
        return f"{self.input}.stride({self.dim})"


Sizes = tuple[int | Size, ...]
_ANY_SIZE = 2**40
"""Bounds from here on are those of whole numbers, and tell nothing of a size."""


def hint(size: Any) -> int:
    """A size as a number: what it was in the traced call. One that data decides is the largest that it may be, where
    that is known, else nothing."""
    if isinstance(size, int):
        return size
    if size.node.has_hint():
        return int(size.node.hint)
    largest = size.node.shape_env.bound_sympy(size.node.expr).upper
    return int(largest) if largest.is_Integer and largest < _ANY_SIZE else 0


def hints(sizes: Sequence[Any]) -> tuple[int, ...]:
    """Sizes or strides as numbers, see `hint`."""
    return tuple(map(hint, sizes))


def is_data(size: Any) -> bool:
    """Whether a size is computed by the graph, and not read of an argument."""
    return not isinstance(size, int) and bool(free_unbacked_symbols(size))


def is_of_arguments(size: Any) -> bool:
    """Whether a size is a number, or computed from sizes and strides of arguments: not from data, ranks or numbers."""
    if isinstance(size, int):
        return True
    return all(symbol in getattr(size.node.shape_env, "size_of", ()) for symbol in size.node.expr.free_symbols)


def numbers_of(value: Any) -> list[Any]:
    """The sizes, strides and offset of a fake tensor; a number as it is; of what is neither, nothing."""
    if isinstance(value, torch.Tensor):
        return [*value.shape, *value.stride(), value.storage_offset()]
    return [value] if isinstance(value, (int, torch.SymInt)) else []


def symbols_of(numbers: Iterable[Any]) -> list[Any]:
    """The symbols of sizes and strides that are computed from sizes of arguments alone, in order of appearance."""
    symbolic = (one.node.expr for one in numbers if isinstance(one, torch.SymInt) and is_of_arguments(one))
    return list(dict.fromkeys(symbol for one in symbolic for symbol in sorted(one.free_symbols, key=str)))


def renamed(size: Any, names: Mapping[Any, str]) -> int | str:
    """A size as text in which symbols have these names; a number as it is."""
    if isinstance(size, int):
        return size
    return str(size.node.expr.xreplace({symbol: type(symbol)(name) for symbol, name in names.items()}))


def is_same(one: Any, other: Any) -> bool:
    """Whether two sizes are known to be equal, in every call."""
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    return bool(statically_known_true(one == other))


def are_same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether sizes or strides are known to be equal, one by one."""
    return len(a) == len(b) and all(map(is_same, a, b))


def fits(found: Sequence[Any], said: Sizes) -> bool:
    """Whether a tensor of the graph has the sizes that a record says. Those that move are symbols there."""
    return len(found) == len(said) and all(
        isinstance(one, torch.SymInt) if isinstance(other, Size) else is_same(one, other)
        for one, other in zip(found, said, strict=True)
    )


def text(size: Any) -> str:
    """A size as a person reads it: in terms of the inputs, the same on every rank."""
    if isinstance(size, (int, Size)):
        return repr(size)
    known: Mapping[Any, Size | Stride] = getattr(size.node.shape_env, "size_of", {})
    return str(renamed(size, {symbol: repr(one) for symbol, one in known.items()}))


def shape_text(sizes: Sequence[Any]) -> str:
    """Sizes as a list, see `text`."""
    return f"[{', '.join(map(text, sizes))}]"
