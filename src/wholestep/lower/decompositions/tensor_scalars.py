"""Calls that take numbers of the host, with tensors of no dimensions in the place of the numbers.

ATen takes rates and the like as arguments of its own kind, which a compiler would freeze. Here the same arithmetic is
written out on tensors: in float32 where the operands are of half the size, as the kernels do it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from wholestep.ir import node_meta, op_info
from wholestep.ir.ops.packed_scalars import element
from wholestep.lower.decompositions.optimizers import is_written_out, written_out

Number = Tensor | float
"""A tensor of no dimensions where it is packed."""

_HALF = (torch.bfloat16, torch.float16)


def _add(a: Tensor, b: Tensor, alpha: Number = 1) -> Tensor:
    return a + b * alpha


def _sub(a: Tensor, b: Tensor, alpha: Number = 1) -> Tensor:
    return a - b * alpha


def _addcmul(a: Tensor, b: Tensor, c: Tensor, value: Number = 1) -> Tensor:
    return a + value * (b * c)


def _addcdiv(a: Tensor, b: Tensor, c: Tensor, value: Number = 1) -> Tensor:
    return a + value * (b / c)


def _lerp(a: Tensor, b: Tensor, weight: Number) -> Tensor:
    return a + weight * (b - a)


def _clamp(a: Tensor, min: Number | None = None, max: Number | None = None) -> Tensor:
    a = a if min is None else torch.maximum(a, _limit(min, a))
    return a if max is None else torch.minimum(a, _limit(max, a))


def _limit(number: Number, like: Tensor) -> Tensor:
    # A float64 tensor of no dimensions counts as the number would: integers become float32, and float32 stays.
    return number if isinstance(number, Tensor) else torch.full((), number, dtype=torch.float64, device=like.device)


_RULES: dict[str, Callable[..., Tensor]] = {
    "add": _add,
    "sub": _sub,
    "mul": lambda a, b: a * b,
    "div": lambda a, b, rounding_mode=None: torch.div(a, b, rounding_mode=rounding_mode),
    "pow": torch.pow,
    "addcmul": _addcmul,
    "addcdiv": _addcdiv,
    "lerp": _lerp,
    "clamp": _clamp,
    "clamp_min": lambda a, min: _clamp(a, min=min),
    "clamp_max": lambda a, max: _clamp(a, max=max),
    "maximum": lambda a, b: _clamp(a, min=b),
    "minimum": lambda a, b: _clamp(a, max=b),
}
"""Operator, without ``_foreach_`` -> its arithmetic on one tensor."""


def takes_numbers(node: fx.Node) -> bool:
    """Whether there is a rule for the operator of a call whose arguments are numbers."""
    if is_written_out(node):
        return True
    if not op_info.is_op(node):
        return False
    namespace, name = node.target._schema.name.split("::")  # type: ignore[union-attr]
    return namespace == "aten" and has_rule(name.removeprefix("_foreach_"))


def has_rule(name: str) -> bool:
    """Whether there is a rule for the operator with this name, without ``_foreach_``."""
    return name in _RULES


class Numbers(fx.Interpreter):
    """Runs a graph with tensors in the place of numbers that it reads by `element`."""

    def run_node(self, n: fx.Node) -> Any:
        """The value of a node; of an `element` the tensor that holds it."""
        if n.target is element:
            packed, index = n.args
            return self.env[packed].select(0, index)  # type: ignore[index]
        if n.op == "call_function" and is_written_out(n):
            return written_out(n.target, *self.fetch_args_kwargs_from_env(n))
        if n.op != "call_function" or not any(arg.target is element for arg in n.all_input_nodes):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return by_rule(n.target, args, kwargs, node_meta.value(n))


def by_rule(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: Any) -> Any:
    """What a call gives, computed by the operator's rule; `like` are the values of the call when it was captured."""
    name = op._schema.name.split("::")[1]
    if not name.startswith("_foreach_"):
        return _one(_RULES[name], args, kwargs, like)
    rule, count, options = _RULES[name.removeprefix("_foreach_")], len(like), list(kwargs.values())
    given = ((_at(args, index, count), _at(options, index, count)) for index in range(count))
    return [
        _one(rule, own, dict(zip(kwargs, named, strict=True)), like[index]) for index, (own, named) in enumerate(given)
    ]


def _at(args: Sequence[Any], index: int, count: int) -> tuple[Any, ...]:
    """The arguments of one index: elements of lists, and what is the same for all."""
    return tuple(arg[index] if isinstance(arg, (list, tuple)) and len(arg) == count else arg for arg in args)


def _one(rule: Callable[..., Tensor], args: Sequence[Any], kwargs: dict[str, Any], like: Tensor) -> Tensor:
    dtype = torch.float32 if like.dtype in _HALF else like.dtype

    def raised(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    result = rule(*map(raised, args), **{key: raised(value) for key, value in kwargs.items()})
    return result.to(like.dtype)
