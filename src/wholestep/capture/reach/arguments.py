"""Arguments of a call as leaves, and stand-ins in a trace for those that vary.

A number is an input of the graph (`capture/scalars/varying_numbers.py`). Text is none: a file's name beside the batch.
Where the step does not look at it, any text will do, which is found out by a text that cannot be looked at.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from wholestep.capture.python import tree_util
from wholestep.capture.python.snapshot import SCALARS
from wholestep.capture.scalars.opaque_value import OpaqueValue
from wholestep.capture.scalars.varying_numbers import ScalarLocation, VaryingValue

ArgumentPath = tuple[Any, ...]
"""From a call to something in its arguments: 0 and a place, or 1 and a name, then keys and attributes."""


def path_text(way: ArgumentPath) -> str:
    """``argument 1['x']``."""
    kind, start, *keys = way
    return f"argument {start if kind == 0 else repr(start)}{''.join(f'[{key!r}]' for key in keys)}"


def still_waits(leaf: object) -> bool:
    """Whether it is what a functional collective has given outside of the step, which may still be on its way."""
    return isinstance(leaf, AsyncCollectiveTensor)


def awaited(leaf: Any) -> Any:
    """The plain tensor that has arrived, on the same memory; anything else as it is."""
    return leaf.trigger_wait() if still_waits(leaf) else leaf


@dataclass(frozen=True, slots=True)
class Leaf:
    """A number or a text among the arguments, by the way to it: the same in every call."""

    path: tuple[Any, ...]
    is_text: bool

    def __str__(self) -> str:
        return path_text(self.path)


@dataclass(frozen=True, slots=True)
class ArgumentSize:
    """One dim of a tensor among the arguments, by the way to it: the same in every call."""

    path: ArgumentPath
    dim: int

    def __str__(self) -> str:
        return f"dim {self.dim} of {path_text(self.path)}"


def leaf_of(path: tuple[Any, ...], thing: Any) -> Leaf | None:
    """The leaf that a thing is among the arguments; None where it is neither a number nor text."""
    return Leaf(path, type(thing) is str) if type(thing) in (int, float, str) else None


def marked_sizes(args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: bool | None) -> list[ArgumentSize]:
    """The dims of tensors among the arguments that may be symbols in the first trace already.

    Args:
        dynamic: True for all but those of ``torch._dynamo.mark_static``; None for those of
            ``torch._dynamo.mark_dynamic``; False for none.
    """
    if dynamic is False:
        return []
    leaves, spec = tree_util.flatten((args, kwargs))
    pairs = [(path, one) for path, one in zip(tree_util.paths(spec), leaves, strict=True) if isinstance(one, Tensor)]
    found: list[ArgumentSize] = []
    for path, tensor in pairs:
        marks = (getattr(tensor, f"_dynamo_{kind}_indices", ()) for kind in ("dynamic", "weak_dynamic", "static"))
        strong, weak, static = map(frozenset, marks)
        dims = range(tensor.dim()) if dynamic else sorted(strong | weak)
        found += [ArgumentSize(path, dim) for dim in dims if dim not in static - strong]
    return found


class Arguments:
    """The arguments of one call, flattened."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        self.leaves, self.spec = tree_util.flatten((args, kwargs))
        self.paths = list(tree_util.paths(self.spec))
        """Per leaf the way to it."""
        self.numbers = {leaf: one for leaf, one in enumerate(self.leaves) if type(one) in (int, float)}
        """By leaf, what stands there for a number: itself, or in a trace a symbol."""
        self._varying: set[int] = set()
        self.opaque_leaves: tuple[int, ...] = ()
        """Leaves that are any text, at which the step does not look."""

    def mark_varying(self, varying: Collection[VaryingValue]) -> list[ScalarLocation]:
        """Marks leaves as varying: gives the places of numbers, and notes text in `opaque_leaves`."""
        known = {leaf: leaf_of(path, self.leaves[leaf]) for leaf, path in enumerate(self.paths)} if varying else {}
        found = [leaf for leaf, one in known.items() if one is not None and one in varying]
        self.opaque_leaves = tuple(leaf for leaf in found if leaf not in self.numbers)
        self._varying = set(found)
        numbers = (leaf for leaf in found if leaf in self.numbers)
        return [ScalarLocation(self.numbers, leaf, f"argument {leaf}", type(self.numbers[leaf])) for leaf in numbers]

    def moving_dims(self, varying: Collection[VaryingValue]) -> dict[int, set[int]]:
        """Per leaf the dims that are said to move."""
        dims: dict[ArgumentPath, set[int]] = {}
        for one in varying:
            if isinstance(one, ArgumentSize):
                dims.setdefault(one.path, set()).add(one.dim)
        return {leaf: dims[path] for leaf, path in enumerate(self.paths) if path in dims} if dims else {}

    def traced(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments for the trace: symbols for varying numbers, opaque values for varying text."""
        leaves = [self.numbers.get(leaf, one) for leaf, one in enumerate(self.leaves)]
        for leaf in self.opaque_leaves:
            leaves[leaf] = OpaqueValue(
                f"The step looks at argument {leaf}, a text, which is another one in other calls.", str
            )
        return self._rebuilt(leaves)

    def _rebuilt(self, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other leaves. Those in which none moves, and that share no object, are the very ones."""
        first, parts = 0, []
        positional, named = self.spec.children()
        args, kwargs = tree_util.unflatten(leaves, self.spec) if self._varying else (self.args, self.kwargs)
        shares = bool(self._varying) and tree_util.refers(self.spec)
        made = (*args, *(kwargs[name] for name in named.context))
        specs = (*positional.children(), *named.children())
        for child, thing, other in zip(specs, self._given(named), made, strict=True):
            own = range(first, first + child.num_leaves)
            first += child.num_leaves
            parts.append(other if shares or self._any_varies(own) else thing)
        return tuple(parts[: len(self.args)]), dict(zip(named.context, parts[len(self.args) :], strict=True))

    def _given(self, named: tree_util.TreeSpec) -> Iterator[Any]:
        yield from self.args
        yield from (self.kwargs[name] for name in named.context)

    def _any_varies(self, leaves: Iterable[int]) -> bool:
        return not self._varying.isdisjoint(leaves)


def holders(name: str, arg: Any) -> Iterator[tuple[str, Any]]:
    """The things in an argument that outlive the call: modules, optimizers, and objects that hold them.

    Whatever `tree.flatten` takes apart, containers and objects that hold tensors, is data of this call.
    """
    for keys, leaf in tree_util.leaves_with_keys(arg):
        if not isinstance(leaf, (Tensor, *SCALARS)):
            yield ".".join([name, *map(str, keys)]), leaf
