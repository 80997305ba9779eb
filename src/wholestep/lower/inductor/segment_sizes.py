"""Sizes that move, as Inductor knows them in one segment: as symbols of its own, of which it may ask what it likes.

[Note: compiled once for all sizes]
A segment has a shape environment for itself, in which each symbol of its arguments is a new one with the same hint.
Inductor answers a question about a size by the hint, as capture does, and writes kernels that count on it: sums over
up to 4,096 rows are not compensated. What it has asked is asked of the sizes of the trace as well, so a call with
another answer is another trace, whose segments are compiled with other hints.

Alike segments share what is compiled as far as their own hints give the same answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx as fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic

from wholestep.errors import InternalError
from wholestep.ir import node_meta
from wholestep.ir.segment import Segment
from wholestep.ir.sizes import numbers_of


class NotForAllSizes(Exception):
    """A segment that Inductor can compile for the sizes of one call alone. Says why."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What compiled code counts on, of the sizes of its arguments."""

    symbols: tuple[Any, ...]
    """In the order of `Segment.symbols`."""
    conditions: tuple[Any, ...]
    """Expressions of them that are true."""

    def hold(self, segment: Segment) -> bool:
        """Whether the code is right for the sizes of a segment that is alike, as they were in the traced call."""
        own = zip(self.symbols, segment.symbols, strict=True)
        known = {one: sympy.Integer(_env(segment).size_of[symbol].hint) for one, symbol in own}
        return all(bool(one.xreplace(known)) for one in self.conditions)

    def require(self, segment: Segment) -> None:
        """Has the trace of a segment hold for such sizes alone."""
        own = dict(zip(self.symbols, segment.symbols, strict=True))
        for one in self.conditions:
            if not _env(segment).evaluate_expr(one.xreplace(own)):
                raise InternalError(f"{segment.name} runs code that counts on {one.xreplace(own)}, which is not so")


class SegmentSizes:
    """The symbols of one segment while it is compiled."""

    def __init__(self, segment: Segment, mode: FakeTensorMode) -> None:
        """`mode`: that of the compiler, with a shape environment that nothing else has touched."""
        assert mode.shape_env is not None  # see above
        self._segment, self._mode, self._own = segment, mode, mode.shape_env
        self._fresh: dict[Any, Any] = {}
        self._hints: dict[Any, int] = {}
        for number, symbol in enumerate(segment.symbols):
            hint = _env(segment).size_of[symbol].hint
            fresh = self._own.create_symbol(hint, ConstantSource(f"n{number}"), DimDynamic.DYNAMIC)
            self._fresh[symbol], self._hints[fresh] = fresh, hint

    def inputs(self) -> list[Any]:
        """A fake tensor per argument, or a size."""
        return [self._input(node) for node in self._segment.graph.find_nodes(op="placeholder")]

    def of(self, size: Any) -> Any:
        """A size of the segment's values in the compiler's symbols."""
        if isinstance(size, int):
            return size
        expression = size.node.expr.xreplace(self._fresh)
        if not expression.free_symbols.issubset(self._fresh.values()):
            raise NotForAllSizes(f"{expression} is no size of its arguments")
        return self._own.create_symintnode(expression, hint=size.node.hint)

    def asked(self) -> Asked:
        """What has been asked until now. Raises NotForAllSizes where a size had to be a number."""
        fresh = tuple(self._fresh.values())
        if not fresh:
            return Asked((), ())
        for symbol in fresh:
            if (found := self._own.replacements.get(symbol)) is not None and found.is_number:
                raise NotForAllSizes(f"a size has to be {found}")
        asked = [one for one in dict.fromkeys(guard.expr for guard in self._own.guards) if one.free_symbols]
        for one in asked:
            if isinstance(one, sympy.Eq) and one.rhs.is_number and not _holds_elsewhere(one, self._hints):
                raise NotForAllSizes(f"{one.lhs} has to be {one.rhs}")
        return Asked(fresh, tuple(asked))

    def _input(self, node: fx.Node) -> Any:
        value = node_meta.value(node)
        if isinstance(value, torch.SymInt):
            return self.of(value)
        with self._mode:
            if all(isinstance(one, int) for one in numbers_of(value)):
                return _empty_like(value)
            if not isinstance(value.storage_offset(), int) or value.storage_offset():
                raise NotForAllSizes(f"{node.name} begins within the memory of another tensor")
            shape, stride = (list(map(self.of, numbers)) for numbers in (value.shape, value.stride()))
            return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)


_ELSEWHERE = 64
"""So many larger sizes are tried for an equality: a multiple of 64 is a condition like others, 7 is one size."""


def _holds_elsewhere(condition: Any, hints: Mapping[Any, int]) -> bool:
    grown = ({one: sympy.Integer(hint + more) for one, hint in hints.items()} for more in range(1, _ELSEWHERE + 1))
    return any(bool(condition.xreplace(one)) for one in grown)


def _empty_like(like: torch.Tensor) -> torch.Tensor:
    """A tensor of the mode that is on, with the layout of another one."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
    base = torch.empty(like.storage_offset() + max(reach, 0), dtype=like.dtype, device=like.device)
    return base.as_strided(like.shape, like.stride(), like.storage_offset())


def _env(segment: Segment) -> Any:
    """The shape environment of the trace, which knows the sizes of arguments by symbol."""
    return segment.sizes[0].node.shape_env
