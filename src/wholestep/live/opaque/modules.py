"""Modules whose call is one record, since all that their Python reads is known and can be looked at.

[Note: opaque and open modules]
A module is *opaque* where a capture of its call shows that it computes tensors of tensors and does nothing else. The
guards of that capture say at any later call whether its Python would do the same again. If it would, the call is a
record, and the Python of the module runs only when a piece is compiled. Any other module is *open*: its Python runs at
every call, and the modules that it calls are looked at in turn. So a read, a print or a counter somewhere in a model
costs the call of that module, and not the model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from wholestep.capture.bind.captured import Captured, ResultSink
from wholestep.capture.capture import capture
from wholestep.capture.guards.size_guards import SizeGuard
from wholestep.capture.python import tree_util
from wholestep.capture.python.code_owner import is_library_class
from wholestep.capture.python.snapshot import Snapshot
from wholestep.capture.reach.arguments import ArgumentPath, ArgumentSize
from wholestep.capture.reach.traced_inputs import StateSource
from wholestep.capture.wrappers.fully_shard_hooks import is_fully_sharded
from wholestep.errors import CaptureError, WholestepError
from wholestep.live.sizes.module_sizes import Layout, ModuleSizes
from wholestep.util.gradient_node import askable, is_leaf

log = logging.getLogger("wholestep.live")

MAX_STATES = 4
"""States of one module that are traced. One that meets more of them is open: it changes too often."""


class FunctionCall(nn.Module):
    """A call of an ``autograd.Function``, so that it can be one record like that of a module."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Applies the function."""
        return self.function.apply(*args, **kwargs)


def _name_of(module: nn.Module) -> str:
    """The name of its class, as messages and the source of pieces call it."""
    return module.function.__name__ if isinstance(module, FunctionCall) else type(module).__name__


class OpaqueModule:
    """A module in one state of everything that its Python reads. Called, it is the module."""

    def __init__(self, module: nn.Module, captured: Captured, leaves: list[Any]) -> None:
        """`captured`: a call of the module in this state and with these leaves of arguments, of which `why_open` gives
        no reason."""
        self.module = module
        self._guards, self._sizes = captured.guards, ModuleSizes(captured, leaves)
        self._kinds = (torch.is_grad_enabled(), *map(_kind, leaves))
        sources = zip(captured.spec.inputs, captured.binding.tensors, strict=True)
        used = [(one.slot, it) for one, it in sources if isinstance(one, StateSource) and isinstance(it, torch.Tensor)]
        own = chain(module.parameters(), module.buffers(), (tensor for _, tensor in used))
        self.tensors: tuple[torch.Tensor, ...] = tuple({id(one): one for one in own}.values())
        """Its parameters and buffers, and what else its graph reads."""
        self.ids = frozenset(map(id, self.tensors))
        self._places: dict[int, int] = {}
        self._first_place = -1
        self.written = tuple(tensor for slot, tensor in used if slot in captured.spec.reads.written)
        """Those that its call writes to."""

    @property
    def __name__(self) -> str:
        """The name of its class."""
        return _name_of(self.module)

    def places_from(self, start: int) -> dict[int, int]:
        """By id of its tensors their numbers, where the first one has number `start`. Not to be written to: it is kept,
        since that is the same number at most calls.
        """
        if self._first_place != start:
            self._first_place, self._places = start, dict(zip(map(id, self.tensors), count(start), strict=False))
        return self._places

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""
        return self.module(*args, **kwargs)

    def holds(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether everything that its Python reads is as it was, and arguments like these have sizes that it takes."""
        return self.is_as_it_was() and self._sizes.why_not(tree_util.flatten((args, kwargs))[0]) is None

    def is_as_it_was(self) -> bool:
        """Whether everything that its Python reads is as it was."""
        return self._guards.state_why_not() is None

    def results_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Layout | None]:
        """Layouts of what it gives for tensors like these. Raises CaptureError for sizes that it does not take."""
        leaves, _ = tree_util.flatten((args, kwargs))
        if why_not := self._sizes.why_not(leaves):
            raise CaptureError(why_not)
        return self._sizes.results(leaves)

    @property
    def is_changed(self) -> bool:
        """Whether an object that its Python reads is not as it was. (Records have the modes of torch themselves.)"""
        return bool(self._guards.changed_containers())

    def joined(self, other: OpaqueModule) -> bool:
        """Takes the guards of another capture of the module in the same state, whose sizes include its own.

        Records of both are of the same call then. False, and nothing is taken, where it is something else.
        """
        is_same = self._kinds == other._kinds and self.is_as_it_was() and self.ids == other.ids
        is_wider = is_same and other._sizes.covers(self._sizes)
        if is_wider:
            self._guards, self._sizes = other._guards, other._sizes
        return is_wider

    def moved_dims(self, leaves: Mapping[ArgumentPath, Any]) -> set[ArgumentSize]:
        """Dims of these leaves of arguments that have another size than in the captured call."""
        return {one for one in self._guards.varying_values(leaves) if isinstance(one, ArgumentSize)}

    def takes(self, leaves: list[Any], spec: tree_util.TreeSpec) -> bool:
        """Whether a call with these arguments is the one that was captured, now."""
        return self._guards.why_not(leaves, spec) is None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While open, what its Python reads is as it was when the call was recorded; then as it is now."""
        changed = self._guards.changed_containers()
        newer = [Snapshot(one.container, one.path, one.keys, held=one.now()) for one in changed]
        for one in changed:
            one.restore()
        try:
            yield
        finally:
            for one in newer:
                one.restore()


@dataclass(frozen=True, slots=True)
class OpenModule:
    """A module whose Python runs at once, and whole: what it gathers for its time is gone after it."""

    module: nn.Module

    @property
    def __name__(self) -> str:
        """The name of its class."""
        return type(self.module).__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""
        return self.module(*args, **kwargs)


@dataclass(slots=True)
class _Known:
    """What is known of one module."""

    states: list[OpaqueModule] = field(default_factory=list)
    why_open: str = ""
    moving: set[ArgumentSize] = field(default_factory=set)
    """Dims of its arguments that have had several sizes."""
    constant: set[ArgumentSize] = field(default_factory=set)
    """Those of them that can be no symbols."""
    is_small: bool = False
    """Whether it is open for no more than that it is hardly more than one call of torch."""


class OpaqueModules:
    """The modules that a live step calls."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()
        self._functions: dict[tuple[str, str], FunctionCall | None] = {}
        """By module and name. None for one that is another class each time: the step makes it."""

    @property
    def open(self) -> dict[str, str]:
        """Why modules are open, by the names of their classes."""
        rows = ((_name_of(one), known) for one, known in self._known.items())
        return {name: known.why_open for name, known in rows if known.why_open and not known.is_small}

    def call_of(self, function: type[torch.autograd.Function]) -> FunctionCall | None:
        """The module that calls a function; None if the step makes the function itself."""
        key = (function.__module__, function.__qualname__)
        call = self._functions.get(key)
        if key not in self._functions:
            call = self._functions[key] = FunctionCall(function)
        elif call is not None and call.function is not function:
            call = self._functions[key] = None
        return call

    def reopen(self, module: nn.Module, why: str) -> None:
        """Has a module run its Python from now on."""
        self._known[module].why_open = why

    def may_be_opaque(self, module: nn.Module) -> bool:
        """Whether it is worth to look at a module: it is more than a call of torch, and not known to be open."""
        known = self._known.get(module)
        if known is None:
            why = _why_not_worth(module)
            known = self._known[module] = _Known(why_open=why, is_small=bool(why))
        return not known.why_open

    def find(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpaqueModule | None:
        """The module as it is now, for a call with these real tensors. None if it is open."""
        known = self._known[module]
        leaves, spec = tree_util.flatten((args, kwargs))
        by_path: dict[ArgumentPath, Any] = {}
        for one in known.states:
            if one.takes(leaves, spec):
                return one
            by_path = by_path or dict(zip(tree_util.paths(spec), leaves, strict=True))
            known.moving |= one.moved_dims(by_path) - known.constant
        if len(known.states) == MAX_STATES:
            known.why_open = f"it was called in more than {MAX_STATES} states, or with that many kinds of arguments"
            return None
        made = self._captured(known, module, args, kwargs)
        if made is None:
            return None
        found = OpaqueModule(module, made, leaves)
        if wider := next((one for one in known.states if one.joined(found)), None):
            return wider
        known.states.append(found)
        return found

    def _captured(
        self, known: _Known, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Captured | None:
        args, kwargs = pytree.tree_map_only(torch.Tensor, _detached, (args, kwargs))
        try:
            captured = capture(module, args, kwargs, known.moving)
            if captured.constant_sizes:
                known.constant |= {size for size, why in captured.constant_sizes.items() if why is not None}
                known.moving -= known.constant
                captured = capture(module, args, kwargs, known.moving - captured.constant_sizes.keys())
        except WholestepError as error:
            known.why_open = str(error)
        except Exception as error:  # the module's own, most likely: it will raise it again when it runs
            log.debug("%s raised %r while captured", type(module).__name__, error)
            return None
        else:
            known.why_open = _why_open(module, captured)
        if known.why_open:
            log.debug("%s is open: %s", type(module).__name__, known.why_open)
            return None
        return captured


def _kind(leaf: Any) -> Any:
    """What else than its sizes guards compare of an argument. Calls of two kinds by turns are two states."""
    return (leaf.dtype, leaf.device, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else type(leaf)


def _why_not_worth(module: nn.Module) -> str:
    if any(isinstance(one, DistributedDataParallel) for one in module.modules()):
        return "its forward says whether gradients are reduced, and the module inside is looked at"
    if is_fully_sharded(module) or isinstance(module, FunctionCall):
        return ""
    if not module._modules and is_library_class(type(module)):
        return "it is a layer of a library"
    if next(chain(module.parameters(), module.buffers()), None) is None:
        return "it has no parameters"
    return ""


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor for a capture, which wants no graph from before."""
    return askable(tensor) if is_leaf(tensor) else tensor.detach().requires_grad_(tensor.requires_grad)


def _why_open(module: nn.Module, captured: Captured) -> str:
    """What a call of a module does besides computing tensors; empty if nothing."""
    spec, graph_outputs = captured.spec, captured.spec.outputs
    if not captured.settled:
        return "it writes to objects of Python"
    if spec.requires_grad:
        return "it freezes parameters, or thaws them"
    if spec.stepped_optimizers:
        return "it steps an optimizer"
    if not all(isinstance(one, ResultSink) for one in graph_outputs):
        return "it leaves gradients or state of optimizers"
    filled = {one.leaf for one in graph_outputs if isinstance(one, ResultSink)}
    if any(leaf is not None for number, leaf in enumerate(spec.leaves) if number not in filled):
        return "it returns something else than new tensors"
    values = [one for one in captured.guards.values if not isinstance(one, SizeGuard)]
    if values or spec.reads.foreign:
        return "it depends on what is computed anew for every call"
    if any(_has_hooks(param) for param in module.parameters()):
        return "a parameter has hooks on its gradient"
    return ""


def _has_hooks(param: torch.Tensor) -> bool:
    return bool(param._backward_hooks or (is_leaf(param) and param._post_accumulate_grad_hooks))
