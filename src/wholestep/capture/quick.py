"""What stands before full comparisons: the native look and the native match of arguments, where they are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from wholestep.capture import native, tree
from wholestep.capture.native.probe import PARAMETER, STATE, VERSIONED, WITH_GRADIENT, WITHOUT_GRADIENT
from wholestep.capture.views import CellView
from wholestep.capture.walk import Watch

__all__ = ["PARAMETER", "STATE", "VERSIONED", "WITHOUT_GRADIENT", "WITH_GRADIENT"]  # named here for the guards

TENSORS, MODES = -1, -2
"""Numbers that `Look.moved` gives besides those of containers."""

_THINGS = (bool, int, float, str, type(None), nn.Module, Optimizer)
"""Leaves without data that are compared natively: by identity, numbers and text by value."""


class Look(Protocol):
    """What may have changed since everything was last compared."""

    def moved(self) -> tuple[int, ...]:
        """Numbers of containers, TENSORS and MODES. What is not named has not changed."""

    def renew(self) -> None:
        """Says that everything which the last `moved` named was compared and is as it was."""


class Match(Protocol):
    """The signature of a call."""

    def match(self, call: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Any] | None:
        """The leaves of ``(args, kwargs)`` if the call surely has this signature, else None."""


def look(tensors: Sequence[torch.Tensor], wants: Sequence[int], containers: Sequence[tuple[Any, Any]]) -> Look | None:
    """A native look at tensors and containers as they are now; None where everything has to be compared in full.

    Args:
        wants: per tensor what is looked at besides its layout, see `wholestep.capture.native.probe`.
        containers: pairs of a thing and what it held, as `watchable` gives them.
    """
    module = native.module()
    if module is None:
        return None
    try:
        things, held = zip(*containers, strict=True) if containers else ((), ())
        made: Look = module.Look(tuple(tensors), bytes(wants), things, held)
    except TypeError:  # a tensor that is more than its TensorImpl says: sparse, a subclass with dispatch of its own
        return None
    return made


def watchable(watch: Watch) -> tuple[Any, Any] | None:
    """A watched container as the native look takes it, with what it held; None if it cannot vouch for it."""
    container = watch.container
    if isinstance(container, CellView):
        return (container.cell, watch.held[container.key]) if container.key in watch.held else None
    if isinstance(container, list):
        return container, tuple(watch.held)
    return (container, None) if type(container) in VERSIONED else None


def match(
    spec: tree.TreeSpec, leaves: Sequence[Any], is_data: Sequence[bool], aliases: Sequence[int], state: Sequence[Any]
) -> Match | None:
    """The native signature of a call; None where only the full comparison can tell.

    Args:
        leaves: per leaf the description of a tensor (`wholestep.capture.guards.describe`), or the thing itself.
        aliases: per leaf that is data the first leaf that is the same tensor.
        state: tensors of the state, which are no data.
    """
    module, structure, alias = native.module(), tree.structure(spec), iter(aliases)
    if module is None or structure is None:
        return None
    described = tuple((*leaf, next(alias)) if data else (leaf,) for leaf, data in zip(leaves, is_data, strict=True))
    if not all(data or isinstance(leaf, _THINGS) for leaf, data in zip(leaves, is_data, strict=True)):
        return None
    try:
        made: Match = module.Arguments(structure, described, tuple(state))
    except TypeError:
        return None
    return made


Run = Callable[[Callable[[list[Any]], Any], list[Any], tuple[int, ...]], Any]
"""``run(function, inputs, places)``: ``function(inputs)`` with gradients off. Then None stands at the places."""


def run() -> Run:
    """What runs a step's function: natively if the library is there by now."""
    module = native.module()
    return _run if module is None else module.run


def _run(function: Callable[[list[Any]], Any], inputs: list[Any], places: tuple[int, ...]) -> Any:
    with torch.no_grad():
        found = function(inputs)
    for place in places:
        inputs[place] = None
    return found
