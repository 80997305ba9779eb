"""Symbols for dims of arguments that move between calls, and all that a trace asks of them.

[Note: sizes that move]
The first trace takes the sizes of arguments for constants. A dim that has another size in a later call is a symbol in
the next trace (`capture/retrace_policy.py`), which reads the size of the argument when it runs. Sizes 0 and 1 are
constants of traces of their own, as in torch: they broadcast, and torch lays out and computes them differently.

Where Python or an operator asks a question of such a size (``t > 128``, a contiguous layout), torch answers by the size
of the traced call and notes the question. The answers are conditions of the trace (`capture/guards/size_guards.py`).
An operator that wants a number makes the dim a constant: who it was is noted too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from wholestep.capture.python import user_frame
from wholestep.errors import InternalError
from wholestep.ir.serializer import SavedShapes, portable
from wholestep.ir.sizes import Size, Sizes, Stride
from wholestep.util.gradient_node import is_leaf
from wholestep.util.lazy_import import lazy_import

if TYPE_CHECKING:
    from torch._dynamo import source
else:  # it takes as long to import as half of torch, and only a trace with sizes that move needs it
    source = lazy_import("torch._dynamo.source")

SMALLEST = 2
"""The smallest size that moves."""


@dataclass(frozen=True, slots=True)
class SizedArgument:
    """A tensor among the arguments with dims that move."""

    name: str
    """That of the input."""
    sizes: tuple[Size, ...]
    symbols: tuple[Any, ...]
    """Of torch's sympy, one for each of `sizes`."""
    strides: tuple[Any, ...]
    """Numbers and expressions, one per dim."""
    free_strides: tuple[int, ...]
    """Dims whose stride is a symbol of its own."""


@dataclass(frozen=True, slots=True)
class SavedSizes:
    """The symbols of one trace, and what it has asked of them, as plain values: symbols have names."""

    sizes: tuple[Size | Stride, ...]
    """In the order in which they became symbols."""
    arguments: tuple[SizedArgument, ...]
    conditions: tuple[Any, ...]
    """Expressions that are true."""


class SizeEnv(ShapeEnv):
    """The symbols of one trace. torch knows it as a ShapeEnv."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.arguments: list[SizedArgument] = []
        self.operator: Any = None
        """The call that is traced."""
        self.constant: dict[Size, str | None] = {}
        """Dims that have become constants, and who wanted a number; None where a condition holds for one size alone."""
        self._is_condition = False
        """Whether what is asked is true or false, and no number."""
        self.size_of: dict[Any, Size | Stride] = {}
        """By symbol."""

    def fake(self, mode: FakeTensorMode, real: torch.Tensor, name: str, dims: Sequence[int]) -> torch.Tensor:
        """A fake of `real` in which these dims are symbols."""
        sizes = {dim: Size(name, dim, real.shape[dim]) for dim in sorted(dims)}
        symbols = {dim: self._symbol(one) for dim, one in sizes.items()}
        shape = [symbols.get(dim, size) for dim, size in enumerate(real.shape)]
        free: list[int] = []

        def stride(dim: int) -> Any:
            free.append(dim)
            return self._symbol(Stride(name, dim, real.stride(dim)))

        strides = _strides(real, shape, stride)
        with mode:
            made = torch.empty_strided(shape, strides, dtype=real.dtype, device=real.device)
        self.arguments.append(
            SizedArgument(
                name, tuple(sizes.values()), tuple(one.node.expr for one in symbols.values()),
                tuple(one.node.expr if isinstance(one, torch.SymInt) else one for one in strides), tuple(free),
            )
        )  # fmt: skip
        return made.requires_grad_(real.requires_grad)

    def sizes_of(self, name: str, shape: Sequence[int]) -> Sizes:
        """The shape of an input, with a `Size` in the place of each dim that moves."""
        sizes = {size.dim: size for one in self.arguments if one.name == name for size in one.sizes}
        return tuple(sizes.get(dim, size) for dim, size in enumerate(shape))

    def conditions(self) -> list[Any]:
        """All that was asked of sizes until now, as expressions that are true.

        Raises InternalError where something else was asked.
        """
        return list(dict.fromkeys(one for guard in self.guards if (one := self._of_sizes(guard.expr)) is not None))

    def saved(self) -> SavedSizes:
        """The symbols for another process."""

        def told(expressions: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(one if isinstance(one, int) else portable(one, self) for one in expressions)

        return SavedSizes(
            tuple(self.size_of.values()),
            tuple(replace(one, symbols=told(one.symbols), strides=told(one.strides)) for one in self.arguments),
            told(self.conditions()),
        )

    def _of_sizes(self, expression: Any) -> Any:
        """A question about sizes alone: numbers of ranks never change. None for one that has its answer by that."""
        others = {one for one in expression.free_symbols if one not in self.size_of}
        known = {one: self.known_number(one) for one in others}
        if any(number is None for number in known.values()):
            raise InternalError(f"the trace goes by {expression}, which is no question about sizes of arguments")
        found = expression.xreplace(known)
        return None if found.is_Boolean and not found.free_symbols else found

    def known_number(self, symbol: Any) -> Any:
        """The number behind a symbol that is none of a size: that of a rank. None where it is not known."""
        known = getattr(self, "backed_var_to_val", None) or self.var_to_val  # by its name before torch 2.12
        return known.get(symbol)

    def _symbol(self, size: Size | Stride) -> Any:
        where = source.ConstantSource(_name(size))
        symbol = self.create_symbol(size.hint, where, DimDynamic.DYNAMIC)
        self.size_of[symbol] = size
        return self.create_symintnode(symbol, hint=size.hint, source=where)

    def evaluate_expr(self, orig_expr: Any, *rest: Any, **options: Any) -> Any:
        """Called by torch with every question."""
        around, self._is_condition = self._is_condition, orig_expr.is_Relational or orig_expr.is_Boolean
        try:
            return super().evaluate_expr(orig_expr, *rest, **options)
        finally:
            self._is_condition = around

    def _set_replacement(self, a: Any, tgt: Any, *rest: Any, **options: Any) -> None:
        """Called by torch where a symbol turns out to be something else; a number makes the dim a constant."""
        size = self.size_of.get(a)
        if isinstance(size, Size) and tgt.is_number and size not in self.constant:
            self.constant[size] = self._why_constant(a)
        super()._set_replacement(a, tgt, *rest, **options)

    def _why_constant(self, symbol: Any) -> str | None:
        """Who wants a number of a symbol; None where a condition holds for one alone."""
        tied = self.replacements.get(symbol)
        if tied is not None:  # it has been another size until now, which has become a number
            others = (self.size_of.get(one) for one in tied.free_symbols)
            return next((why for one in others if isinstance(one, Size) and (why := self.constant.get(one))), None)
        if self._is_condition:
            return None
        line, call = user_frame.current_line(), str(self.operator or "Python")
        call = "C++ of torch" if call.startswith(("aten.size.", "aten.stride.")) else call
        return f"{call} wants a number{f' at {line}' if line else ''}"


class RestoredSizes(SavedShapes, SizeEnv):
    """The symbols of a trace of another process."""

    def __init__(self, saved: SavedSizes) -> None:
        super().__init__()
        for size in saved.sizes:
            self.named[_name(size)] = self._symbol(size)

        def made(expressions: Sequence[Any]) -> tuple[Any, ...]:
            symbols = {one: self.named[one.name].node.expr for it in expressions for one in _symbols_in(it)}
            return tuple(one if isinstance(one, int) else one.xreplace(symbols) for one in expressions)

        self.arguments = [replace(one, symbols=made(one.symbols), strides=made(one.strides)) for one in saved.arguments]
        for condition in made(saved.conditions):  # asked again, it ties symbols to each other as it did there
            self.evaluate_expr(condition)


def _name(size: Size | Stride) -> str:
    return f"{type(size).__name__}_{size.input}_{size.dim}".lower().replace(".", "_")


def _symbols_in(expression: Any) -> Collection[Any]:
    return () if isinstance(expression, int) else expression.free_symbols


def may_move(tensor: torch.Tensor) -> bool:
    """Whether dims of a tensor may be symbols: a plain one, which no computation outside of the step has made."""
    return (
        type(tensor) is torch.Tensor and tensor.layout is torch.strided and is_leaf(tensor)
        and not tensor.is_conj() and not tensor.is_neg()
    )  # fmt: skip


def memory_of(tensor: torch.Tensor) -> int:
    """Where the memory of a tensor begins; a number of its own for one without memory or strides."""
    found = int(tensor.untyped_storage().data_ptr()) if tensor.layout is torch.strided else 0
    return found or -id(tensor)


def _strides(real: torch.Tensor, shape: Sequence[Any], symbol: Callable[[int], Any]) -> list[Any]:
    """The strides of `real`, as products of its sizes where they are those; others are what `symbol` gives, 0 and 1
    constants."""
    strides: list[Any] = list(real.stride())
    known: dict[int, Any] = {1: 1}
    for dim in sorted(range(real.dim()), key=lambda dim: (real.stride(dim), -dim)):
        stride = real.stride(dim)
        strides[dim] = known[stride] if stride in known else symbol(dim) if stride >= SMALLEST else stride
        known[real.stride(dim) * real.shape[dim]] = strides[dim] * shape[dim]
    return strides
