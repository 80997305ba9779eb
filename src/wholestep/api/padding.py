"""Padding: tensors among the arguments of a step, made longer to a few sizes before the call."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from wholestep.config import Pad
from wholestep.errors import ConfigError
from wholestep.ir.program import InputKind, OutputKind, Program


class Padding:
    """What `wholestep.compile(pad=...)` says, for the calls of one step."""

    def __init__(self, step: Callable[..., Any], pads: Mapping[str, Pad]) -> None:
        """`pads`: by the name of a parameter of the step, or ``batch.tokens`` for an item of one.

        Raises ConfigError for names that the step does not have.
        """
        names = list(inspect.signature(step).parameters)
        self._pads: list[tuple[int, str, Sequence[str], Pad]] = []
        for path, pad in pads.items():
            name, *keys = path.split(".")
            if name not in names:
                raise ConfigError(f"wholestep.compile(pad=...) names {name}. Parameters of the step are {names}.")
            self._pads.append((names.index(name), name, keys, pad))

    def call(
        self, step: Callable[[tuple[Any, ...], dict[str, Any]], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What `step` gives for longer tensors in the place of those that are named. The caller's stay as they are.

        Raises ConfigError where there is no tensor with that dim, and after a call that has written to one of them.
        """
        positional, named, made = list(args), dict(kwargs), list[tuple[str, torch.Tensor, int]]()
        for place, name, keys, pad in self._pads:
            if place < len(positional):
                positional[place] = _padded(positional[place], name, keys, pad, made)
            elif name in named:
                named[name] = _padded(named[name], name, keys, pad, made)
        result = step(tuple(positional), named)
        for path, tensor, version in made:
            if tensor._version != version:
                raise ConfigError(f"The step has written to {path}. {_COPIES}")
        return result

    def check(self, program: Program) -> None:
        """Raises ConfigError for a program that writes to its arguments: they may be copies."""
        for one in program.outputs:
            if one.kind is OutputKind.WRITE and program.inputs[one.target or 0].kind is InputKind.USER:
                raise ConfigError(f"The step writes to {one.name}. {_COPIES}")


_COPIES = (
    "With wholestep.compile(pad=...) it is given copies of its arguments. Return what it writes, or pad batches before "
    "the call."
)


def _padded(thing: Any, path: str, keys: Sequence[str], pad: Pad, made: list[tuple[str, torch.Tensor, int]]) -> Any:
    """The tensor with a longer dim, or a copy of the container with it inside. A new tensor is noted in `made`."""
    if not keys:
        if not isinstance(thing, torch.Tensor) or not -thing.dim() <= pad.dim < thing.dim():
            what = f"{thing.dim()} dims" if isinstance(thing, torch.Tensor) else f"a {type(thing).__name__}"
            raise ConfigError(f"wholestep.compile(pad=...) wants a tensor with dim {pad.dim} in {path}, got {what}.")
        longer = pad.of(thing)
        if longer is not thing:
            made.append((path, longer, longer._version))
        return longer
    key, found = keys[0], copy.copy(thing)
    try:
        place: Any = int(key) if isinstance(thing, (list, tuple)) else key
        item = _padded(thing[place], f"{path}.{key}", keys[1:], pad, made)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(f"wholestep.compile(pad=...) names {path}.{key}, which is not there: {error!r}.") from error
    if isinstance(thing, tuple):
        items = (*thing[:place], item, *thing[place + 1 :])
        return type(thing)(*items) if hasattr(thing, "_fields") else type(thing)(items)
    found[place] = item
    return found
