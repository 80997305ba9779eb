"""Guards of the arguments: structure, constants, layouts and aliases of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from wholestep.capture.guards.guards import Call, Guard
from wholestep.capture.guards.size_guards import moved_dims
from wholestep.capture.guards.tensor_layout import describe, difference, first_aliases, short_text
from wholestep.capture.python import tree_util
from wholestep.capture.python.snapshot import same
from wholestep.capture.reach.arguments import ArgumentPath, leaf_of, path_text
from wholestep.capture.scalars.varying_numbers import VaryingValue
from wholestep.util.gradient_node import is_leaf


@dataclass(frozen=True, slots=True)
class StructureGuard(Guard):
    """The containers among the arguments, with their keys and lengths."""

    spec: tree_util.TreeSpec

    def why_not(self, call: Call) -> str | None:
        if call.spec is None or call.spec is self.spec or call.spec == self.spec:
            return None
        path, then, now = tree_util.difference(self.spec, call.spec)
        return f"{path_text(path) if len(path) > 1 else 'the call'} was {then}, is {now}"


class Constant(NamedTuple):
    """A leaf of the arguments, by number, that is a constant of the trace."""

    leaf: int
    value: Any
    path: ArgumentPath
    is_any_text: bool
    """Whether any text will do, since the step does not look at it."""


@dataclass(frozen=True, slots=True)
class ConstantGuard(Guard):
    """Leaves of the arguments that are no tensors of the call."""

    constants: tuple[Constant, ...]

    def why_not(self, call: Call) -> str | None:
        for index, then, _, is_any_text in self.constants:
            now = call.leaves[index]
            if then is now or (is_any_text and type(now) is str):
                continue
            if not same(then, now):
                return f"argument {index} was {short_text(then)}, is {short_text(now)}"
        return None

    def varying_values(self, leaves: Mapping[ArgumentPath, Any]) -> Iterator[VaryingValue]:
        for _, then, path, is_any_text in self.constants:
            leaf = leaf_of(path, leaves.get(path)) if not is_any_text else None
            if leaf is not None and not same(then, leaves[path]):
                yield leaf


@dataclass(frozen=True, slots=True)
class TensorArgumentGuard(Guard):
    """Layouts of the tensors among the arguments, none of which is of the state."""

    layouts: tuple[tuple[int, ArgumentPath, tuple[Any, ...]], ...]
    """Per leaf the way to it and its description."""
    state_ids: frozenset[int]

    def why_not(self, call: Call) -> str | None:
        for index, _, then in self.layouts:
            now = call.leaves[index]
            if not isinstance(now, torch.Tensor):
                return f"argument {index} was a tensor, is {type(now).__name__}"
            if (layout := describe(now)) != then:
                return difference(f"argument {index}", then, layout)
            if id(now) in self.state_ids:
                return f"argument {index} was data of the call, is a tensor of the model, the optimizer or a closure"
        return None

    def varying_values(self, leaves: Mapping[ArgumentPath, Any]) -> Iterator[VaryingValue]:
        for _, path, then in self.layouts:
            yield from moved_dims(path, then, leaves.get(path))


@dataclass(frozen=True, slots=True)
class ArgumentGradientGuard(Guard):
    """Arguments come without gradients, where the step looks at those."""

    leaves: tuple[int, ...]

    def why_not(self, call: Call) -> str | None:
        for index in self.leaves:
            now = call.leaves[index]
            if isinstance(now, torch.Tensor) and is_leaf(now) and now.grad is not None:
                return f"argument {index} had no gradient before the call, now it has one"
        return None


@dataclass(frozen=True, slots=True)
class AliasGuard(Guard):
    """Which arguments are the same tensor: those are one input of the graph."""

    is_data: tuple[bool, ...]
    aliases: tuple[int, ...]
    """As `first_aliases` gives them."""

    def why_not(self, call: Call) -> str | None:
        data = [index for index, is_data in enumerate(self.is_data) if is_data]
        for index, then, now in zip(data, self.aliases, first_aliases(call.leaves, self.is_data), strict=True):
            if then != now:
                return f"argument {index} was {_alias(index, then)}, is {_alias(index, now)}"
        return None


def _alias(index: int, first: int) -> str:
    return "a tensor of its own" if first == index else f"the same tensor as argument {first}"
