"""Native guards before full comparisons, and the fast path through a usual call."""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from wholestep.capture.native import build
from wholestep.capture.native.self_test import PARAMETER, STATE, VERSIONED, WITH_GRADIENT, WITHOUT_GRADIENT
from wholestep.capture.python import code_names, tree_util
from wholestep.capture.python.container_views import OBJECT_PARTS, CellView, ClassView, PartsView, SlotsView
from wholestep.capture.python.snapshot import Snapshot
from wholestep.capture.python.tracing_thread import CAPTURING
from wholestep.ir.dtensor.shards import SLOTS
from wholestep.ir.ops.dispatch_guard import without_autocast
from wholestep.util.gradient_node import is_leaf

__all__ = ["PARAMETER", "STATE", "VERSIONED", "WITHOUT_GRADIENT", "WITH_GRADIENT"]  # named here for the guards

TENSORS, MODES = -1, -2
"""Numbers that `StateGuard.changed` gives besides those of containers."""

_THINGS = (bool, int, float, str, type(None), nn.Module, Optimizer)
"""Leaves without data that are compared natively: by identity, numbers and text by value."""


class StateGuard(Protocol):
    """What may have changed since everything was last compared."""

    def changed(self) -> tuple[int, ...]:
        """Numbers of containers, TENSORS and MODES. What is not named has not changed."""

    def accept(self) -> None:
        """Says that everything which the last `changed` named was compared and is as it was."""


class SignatureGuard(Protocol):
    """The signature of a call."""

    def match(self, call: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Any] | None:
        """The leaves of ``(args, kwargs)`` if the call surely has this signature, else None."""


def state_guard(
    tensors: Sequence[torch.Tensor], wants: Sequence[int], containers: Sequence[tuple[Any, Any]]
) -> StateGuard | None:
    """A native guard of tensors and containers as they are now; None where everything has to be compared in full.

    Args:
        wants: per tensor what is looked at besides its layout, see `wholestep.capture.native.self_test`.
        containers: pairs of a thing and what it held, as `guardable` gives them.
    """
    module = build.module()
    if module is None:
        return None
    try:
        things, held = zip(*containers, strict=True) if containers else ((), ())
        made: StateGuard = module.StateGuard(tuple(tensors), bytes(wants), things, held, SLOTS)
    except TypeError:  # a tensor that is more than its TensorImpl says: sparse, a subclass with dispatch of its own
        return None
    return made


def have_gradients(tensors: tuple[torch.Tensor, ...]) -> list[bool]:
    """Of each tensor whether it has a gradient. Tensors that are no leaves of a graph have none."""
    module = build.module()
    if module is None:
        return [is_leaf(one) and one.grad is not None for one in tensors]
    found: list[bool] = module.have_gradients(tensors)
    return found


def held_elsewhere(tensors: Iterable[torch.Tensor], *, loaded: bool = False) -> bool:
    """Whether an array, another process or a storage object of the user's may look at the memory of tensors.

    True where nobody can tell. `loaded`: memory that torch has not allocated has come from a file, and is no array's.
    """
    module = build.module()
    return module is None or bool(module.held_elsewhere(tuple(tensors), loaded))


def guardable(snapshot: Snapshot) -> tuple[Any, Any] | None:
    """A container as `state_guard` takes it, with what it held; None if the native guard cannot vouch for it."""
    container = snapshot.container
    if isinstance(container, CellView):
        return (container.cell, snapshot.held[container.key]) if container.key in snapshot.held else None
    if isinstance(container, list):
        return container, tuple(snapshot.held)
    if isinstance(container, SlotsView) and isinstance(container.thing, types.FunctionType):
        return container.thing, tuple(snapshot.held[part] for part in code_names.FUNCTION_PARTS)
    if isinstance(container, PartsView):
        return (container.thing,), tuple(snapshot.held[part] for part in OBJECT_PARTS)
    if isinstance(container, ClassView):
        return container.attributes, None
    if snapshot.ordered and isinstance(container, OrderedDict):  # one that only moves an item has no new version
        return None
    return (container, None) if type(container) in VERSIONED else None


def signature_guard(
    spec: tree_util.TreeSpec,
    leaves: Sequence[Any],
    is_data: Sequence[bool],
    aliases: Sequence[int],
    state: Sequence[Any],
    *,
    any_of_type: Collection[int] = (),
) -> SignatureGuard | None:
    """The native signature of a call; None where only the full comparison can tell.

    Args:
        leaves: per leaf what `wholestep.capture.guards.tensor_layout.describe` gives, or the thing itself.
        aliases: per leaf that is data the first leaf that is the same tensor.
        state: tensors of the state, which are no data.
        any_of_type: leaves, numbers and texts, that may be any of the type that they have.
    """
    module, structure, alias = build.module(), tree_util.structure(spec), iter(aliases)
    if module is None or structure is None:
        return None
    described = tuple(
        (*leaf, next(alias)) if data else (leaf, type(leaf)) if place in any_of_type else (leaf,)
        for place, (leaf, data) in enumerate(zip(leaves, is_data, strict=True))
    )
    if not all(data or isinstance(leaf, _THINGS) for leaf, data in zip(leaves, is_data, strict=True)):
        return None
    try:
        made: SignatureGuard = module.SignatureGuard(structure, described, tuple(state))
    except TypeError:
        return None
    return made


class FastPath:
    """The native guards of one trace, each None where there is none, or none yet.

    Args:
        make_state, make_signature: give them, where everything is known to be as it was while tracing.
        everything: what counts as changed where there is no native guard of the state.
    """

    def __init__(
        self,
        make_state: Callable[[], StateGuard | None],
        make_signature: Callable[[], SignatureGuard | None],
        everything: tuple[int, ...],
    ) -> None:
        self._make_state, self._make_signature, self._everything = make_state, make_signature, everything
        self._make()

    def _make(self) -> None:
        self._awaits_native = build.module() is None
        self.state, self.signature = self._make_state(), self._make_signature()

    def changed(self) -> tuple[int, ...]:
        """What may have changed, see `StateGuard.changed`."""
        return self.state.changed() if self.state is not None else self._everything

    def accept(self) -> None:
        """Says that all of it is as it was. Makes the native guards if the library has come meanwhile."""
        if self.state is not None:
            self.state.accept()
        elif self._awaits_native and build.module() is not None:
            self._make()


Function = Callable[[list[Any]], tuple[Any, ...]]
"""What runs on flat inputs."""


class InputFiller(Protocol):
    """The flat inputs of calls."""

    def run(self, function: Callable[[list[Any]], Any], leaves: list[Any]) -> Any:
        """``function(inputs)`` with gradients and autocast off. Then nothing of the call lives on."""


Number = tuple[int, dict[str, Any], str, int | None]
"""Where a number of a parameter group goes and is: input, group, key, and the place in a tuple such as ``betas``."""


class PythonInputFiller:
    """The flat inputs of calls, in Python.

    Args:
        tensors: per input what lives between calls, or None where a call supplies it.
        user: pairs (input, argument leaf).
        grads: pairs (input, parameter): the input is the parameter's gradient at entry.
    """

    def __init__(
        self,
        tensors: list[Any],
        numbers: Sequence[Number],
        user: Sequence[tuple[int, int]],
        grads: Sequence[tuple[int, torch.Tensor]],
    ) -> None:
        self._tensors, self._numbers, self._user, self._grads = tensors, numbers, user, grads
        # Lists of earlier calls, for the next one: filling in and dropping thousands of entries costs more than the
        # checks of a small step. At most one, unless calls overlap (threads).
        self._free: list[list[Any]] = []

    def filled(self, leaves: list[Any]) -> list[Any]:
        """The inputs of one call."""
        try:
            flat = self._free.pop()
        except IndexError:
            flat = self._tensors.copy()
        for index, group, key, position in self._numbers:
            flat[index] = float(group[key] if position is None else group[key][position])
        for index, leaf in self._user:
            flat[index] = leaves[leaf]
        for index, param in self._grads:
            flat[index] = param.grad
        return flat

    def run(self, function: Callable[[list[Any]], Any], leaves: list[Any]) -> Any:
        """``function(inputs)`` with gradients and autocast off. Then nothing of the call lives on."""
        flat = self.filled(leaves)
        with without_autocast():
            found = function(flat)
        for index, _ in (*self._user, *self._grads):
            flat[index] = None
        self._free.append(flat)
        return found

    def native(self) -> InputFiller:
        """The same natively, if the library is there by now."""
        if (module := build.module()) is None:
            return self
        made: InputFiller = module.InputFiller(
            self._tensors, tuple(self._numbers), tuple(self._user), tuple(self._grads), self._free
        )
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class FastRun:
    """What a call does once its trace is known to hold."""

    inputs: InputFiller
    function: Function
    finish: Callable[[tuple[Any, ...]], Any] | None
    """Makes the step's result of what `function` gives; None where that is its first part."""


class FastCall(Protocol):
    """Calls with one signature, from the arguments to the result."""

    @property
    def hits(self) -> int:
        """Calls that went this way."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result; the `FastCall` itself, and nothing done, if the call may have another signature."""


WhyNot = Callable[[list[Any], tuple[int, ...]], str | None]
"""Compares in full what `StateGuard.changed` named for a call with these leaves. None if all is as it was."""


def fast_call(
    signature: SignatureGuard, state: StateGuard, why_not: WhyNot, always: bool, run: FastRun
) -> FastCall | None:
    """The fast way through calls of a signature; None while `run` has no native inputs.

    Args:
        always: `why_not` is asked at every call, whether or not something has changed.
    """
    module = build.module()
    if module is None or not isinstance(run.inputs, module.InputFiller):
        return None
    made: FastCall = module.FastCall(signature, state, why_not, always, run.inputs, run.function, run.finish, CAPTURING)
    return made
