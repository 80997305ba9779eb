"""Guards of arguments whose sizes move: the layout that the traced expressions give, and what the trace has asked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP
from torch.utils._sympy.printers import PythonPrinter

from wholestep.capture.guards.guards import Call, Guard
from wholestep.capture.guards.tensor_layout import describe, difference
from wholestep.capture.reach.arguments import ArgumentPath, ArgumentSize
from wholestep.capture.scalars.varying_numbers import VaryingValue
from wholestep.capture.sizes.size_symbols import SMALLEST, SavedSizes, SizeEnv
from wholestep.errors import InternalError
from wholestep.ir.sizes import is_of_arguments

_SHAPE, _STRIDES = 2, 3
"""Places in what `describe` gives."""


@dataclass(frozen=True, slots=True)
class SizedLayout:
    """An argument with dims that move."""

    leaf: int
    path: ArgumentPath
    description: tuple[Any, ...]
    """As `describe` gives it, in the traced call."""
    dims: tuple[int, ...]

    def differs(self, now: tuple[Any, ...]) -> bool:
        """Whether more than those dims, and strides, are others."""
        then, size, was = self.description, now[_SHAPE], self.description[_SHAPE]
        return (
            then[:_SHAPE] + then[_STRIDES + 1 :] != now[:_SHAPE] + now[_STRIDES + 1 :]
            or len(size) != len(was)
            or any(a != b for dim, (a, b) in enumerate(zip(size, was, strict=True)) if dim not in self.dims)
        )


def any_size(description: tuple[Any, ...], dims: Collection[int]) -> tuple[Any, ...]:
    """What `describe` gives, with -1 for the sizes that may be any: their conditions are asked after the signature."""
    shape = tuple(-1 if dim in dims else size for dim, size in enumerate(description[_SHAPE]))
    return (*description[:_SHAPE], shape, *description[_SHAPE + 1 :])


class SizeConditions:
    """What a trace has asked of sizes, with the answers. More is asked until the program is lowered."""

    def __init__(self, env: SizeEnv) -> None:
        self._env = env
        self._count = -1
        self._check: Callable[..., tuple[Any, ...]]
        self._texts: list[str] = []
        places = count()
        of_dims = [(one, dim, next(places)) for one in env.arguments for dim in range(len(one.strides))]
        self._free = [place for one, dim, place in of_dims if dim in one.free_strides]
        """Which of all strides are symbols."""

    def why_not(self, sizes: Sequence[int], strides: Sequence[int]) -> str | None:
        """Why the trace does not hold for these sizes and strides of its arguments, which are given one by one."""
        if min(sizes) < SMALLEST:
            names = [size for one in self._env.arguments for size in one.sizes]
            small = next(place for place, size in enumerate(sizes) if size < SMALLEST)
            return f"{names[small]!r} is {sizes[small]}, for which there is a trace of its own"
        if self._count != len(self._env.guards):
            self._compile()
        free = [strides[place] for place in self._free]
        if free and min(free) < SMALLEST:
            return f"the arguments lie in memory with strides {list(strides)}, of which none was that small"
        wanted, truths = self._check(*sizes, *free)
        if wanted != tuple(strides):
            return f"the arguments lie in memory with strides {list(strides)}, not with {list(wanted)}"
        if all(truths):
            return None
        return f"{self._texts[truths.index(False)]} does not hold"

    def evaluator(
        self, numbers: Sequence[int | torch.SymInt]
    ) -> Callable[[Sequence[int], Sequence[int]], tuple[int, ...]]:
        """A function that gives these sizes and strides of the trace, for sizes and all strides of its arguments.

        Raises InternalError where one is no size of arguments.
        """
        expressions = [one.node.expr if isinstance(one, torch.SymInt) else one for one in numbers]
        if not all(is_of_arguments(one) for one in numbers):
            raise InternalError(f"{expressions} are no sizes of arguments")
        printer = PythonPrinter()
        text = "".join(f"{printer.doprint(one)}, " for one in expressions)
        found: Callable[..., tuple[int, ...]] = eval(f"lambda {self._parameters()}: ({text})", dict(SYMPY_INTERP))
        return lambda sizes, strides: found(*sizes, *(strides[place] for place in self._free))

    def saved(self) -> SavedSizes:
        """All that another process needs to know of them."""
        return self._env.saved()

    def texts(self) -> list[str]:
        """The conditions, as a person reads them."""
        self._compile()
        return list(self._texts)

    def _compile(self) -> None:
        env, printer = self._env, PythonPrinter()
        names = {symbol: f"{size!r}" for symbol, size in env.size_of.items()}
        asked = env.conditions()
        strides = [stride for one in env.arguments for stride in one.strides]
        texts = ["".join(f"{printer.doprint(one)}, " for one in some) for some in (strides, asked)]
        self._check = eval(f"lambda {self._parameters()}: (({texts[0]}), ({texts[1]}))", dict(SYMPY_INTERP))
        self._texts = [_named(printer.doprint(one), names) for one in asked]
        self._count = len(env.guards)

    def _parameters(self) -> str:
        """Of functions of sizes and strides: all symbols of sizes, then those of strides."""
        sizes = [symbol for one in self._env.arguments for symbol in one.symbols]
        strides = [one.strides[dim] for one in self._env.arguments for dim in one.free_strides]
        return ", ".join(map(str, [*sizes, *strides]))


def _named(text: str, names: dict[Any, str]) -> str:
    for symbol in sorted(names, key=lambda one: -len(str(one))):
        text = text.replace(str(symbol), names[symbol])
    return text


@dataclass(frozen=True, slots=True)
class SizeGuard(Guard):
    """All arguments with dims that move."""

    layouts: tuple[SizedLayout, ...]
    """In the order of the conditions' arguments."""
    conditions: SizeConditions
    state_ids: frozenset[int]

    def why_not(self, call: Call) -> str | None:
        sizes: list[int] = []
        strides: list[int] = []
        if not call.leaves:  # the state alone is asked for
            return None
        for one in self.layouts:
            now = call.leaves[one.leaf]
            if not isinstance(now, torch.Tensor):
                return f"argument {one.leaf} was a tensor, is {type(now).__name__}"
            if one.differs(layout := describe(now)):
                return difference(f"argument {one.leaf}", one.description, layout)
            if id(now) in self.state_ids:
                return f"argument {one.leaf} was data of the call, is a tensor of the model, the optimizer or a closure"
            sizes += [layout[_SHAPE][dim] for dim in one.dims]
            strides += layout[_STRIDES]
        return self.conditions.why_not(sizes, strides)

    def varying_values(self, leaves: Mapping[ArgumentPath, Any]) -> Iterator[VaryingValue]:
        for one in self.layouts:
            yield from moved_dims(one.path, one.description, leaves.get(one.path))


def moved_dims(path: ArgumentPath, then: tuple[Any, ...], now: Any) -> Iterator[ArgumentSize]:
    """The dims of an argument that have another size, where it is the same kind of tensor. `then`: of `describe`."""
    if not isinstance(now, torch.Tensor):
        return
    layout = describe(now)
    if then[:_SHAPE] + then[_STRIDES + 1 :] != layout[:_SHAPE] + layout[_STRIDES + 1 :]:
        return
    if len(then[_SHAPE]) == len(layout[_SHAPE]):
        for dim, (a, b) in enumerate(zip(then[_SHAPE], layout[_SHAPE], strict=True)):
            if a != b:
                yield ArgumentSize(path, dim)
