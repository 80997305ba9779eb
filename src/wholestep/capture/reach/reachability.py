"""Finds what a step can reach: modules, optimizers, loose tensors, and the Python values it may read.

[Note: what is watched]
Tracing runs the step's Python once. Every Python value it read is frozen in the graph, so each must be
looked at again before the graph is used again. Roots are the arguments, ``self``, closure cells and the
globals that the step's code names, followed through user functions, modules, containers and objects.
- A *watch* holds one dict or list (or set, deque, array) with what it held while tracing. It serves twice: after the
  trace it shows side effects (refused), before each call it shows what changed (retraced).
- Attributes of modules are watched whole. Other objects, the files of Python that the user has written among them,
  are watched only in the attributes whose names occur in code that the step can reach, so a counter that the training
  loop moves does not retrace. Classes: `wholestep.capture.python.class_attributes`.
"""

from __future__ import annotations

import functools
import inspect
import logging
import types
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from wholestep.capture.python import tree_util
from wholestep.capture.python.class_attributes import CALLED_BY_TORCH, NOT_IN_A_STEP, ClassAttributes, functions_in
from wholestep.capture.python.code_owner import NO_STATE, is_library_class, is_user_class, is_user_code, is_user_file
from wholestep.capture.python.container_views import BUFFERS, CellView, ContentView, SlotsView, slots
from wholestep.capture.python.snapshot import SCALARS, Snapshot
from wholestep.capture.reach import grad_scaler, rng_and_iterators
from wholestep.capture.reach.unwrap_compiled import is_compiled
from wholestep.capture.scalars import hyperparameters

log = logging.getLogger("wholestep")

_MAX_DEPTH = 12
_MAX_ITEMS = 4096  # what a longer list holds is data, not structure
_MOST_BYTES = 1 << 20  # of numbers that every call compares
_BEHIND = ((UserDict, "data"), (UserList, "data"), (ChainMap, "maps"))
_OPAQUE = (types.ModuleType, type, torch.Generator, torch.utils.data.DataLoader, torch.utils.data.Dataset, torch.Size)
_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs"
)  # fmt: skip
GLOBAL_HOOKS = tuple(
    hooks for name, hooks in vars(nn.modules.module).items() if name.startswith("_global_") and "hooks" in name
)
"""The dicts of hooks that run on every module."""
_OWN_ATTRIBUTES = frozenset(nn.Module().__dict__)


@dataclass(slots=True)
class Reachable:
    """What the walk found, each with the name under which the step reaches it."""

    modules: dict[int, tuple[str, nn.Module]] = field(default_factory=dict)
    """Root modules only; their children come with them."""
    optimizers: dict[int, tuple[str, Optimizer]] = field(default_factory=dict)
    schedulers: list[tuple[str, Any]] = field(default_factory=list)
    tensors: dict[int, tuple[str, torch.Tensor]] = field(default_factory=dict)
    """Loose tensors: neither parameter nor buffer of a module, nor optimizer state, nor an argument."""
    scalers: list[tuple[str, GradScaler]] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    generators: dict[int, tuple[str, Any]] = field(default_factory=dict)
    """Random generators, of torch and others."""
    iterators: dict[int, str] = field(default_factory=dict)
    """Names of what has a next item, by id."""
    compiled: list[str] = field(default_factory=list)
    """Names of what torch.compile has made of modules and functions."""
    codes: list[types.CodeType] = field(default_factory=list)
    """The user's code that the step can reach, hooks included."""


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _codes(const)


def _names(code: types.CodeType) -> Iterator[str]:
    """Names of globals and attributes in a code, those included that it asks for by text."""
    yield from code.co_names
    if not {"getattr", "hasattr", "attrgetter"}.isdisjoint(code.co_names):
        yield from (text for text in code.co_consts if isinstance(text, str) and text.isidentifier())


def _names_in_library(kind: type) -> frozenset[str]:
    """Names in the methods of a class of an installed library, whose code is not looked through otherwise."""
    bases = [base for base in kind.__mro__ if not is_library_class(base) and not is_user_class(base)]
    methods = [one for base in bases for key, item in vars(base).items() if key not in NOT_IN_A_STEP
               for one in functions_in(item)]  # fmt: skip
    return frozenset(name for one in methods for code in _codes(inspect.unwrap(one).__code__) for name in _names(code))


def is_wrapper(opt: Optimizer) -> bool:
    """Whether an optimizer has no groups of its own: accelerate and Lightning put such a one around another."""
    return "param_groups" not in vars(opt)


class Walker:
    """Walks from a step to everything it can reach. Holds the findings; used once."""

    def __init__(self) -> None:
        self.found = Reachable()
        self._seen: set[int] = set()
        self._keep: list[Any] = []  # ids in _seen stay valid while their objects live
        self._names: set[str] = set(CALLED_BY_TORCH)
        self._of_library: dict[type, frozenset[str]] = {}
        self._later: list[tuple[str, Any]] = []
        self._classes = ClassAttributes()

    def visit(self, name: str, thing: Any, depth: int = 0) -> None:
        """Looks at one reachable thing."""
        if isinstance(thing, type) and not is_library_class(thing):
            self._classes.add(thing)
        if isinstance(thing, SCALARS) or depth > _MAX_DEPTH or id(thing) in self._seen:
            return
        if isinstance(thing, rng_and_iterators.KINDS):
            self.found.generators[id(thing)] = (name, thing)
        if isinstance(thing, _OPAQUE) and not _is_users_module(thing):
            return
        self._seen.add(id(thing))
        self._keep.append(thing)
        if hasattr(type(thing), "__next__"):
            self.found.iterators[id(thing)] = name
        if isinstance(thing, torch.Tensor):
            self.found.tensors[id(thing)] = (name, thing)
            self._on_tensor(name, thing, depth)
        elif isinstance(thing, nn.Module):
            self._module(name, thing, depth)
        elif isinstance(thing, Optimizer) and not is_wrapper(thing):
            self.found.optimizers[id(thing)] = (name, thing)
            self._classes.add(type(thing))
            for key, item in list(vars(thing).items()):
                if key not in hyperparameters.torch_group_keys():
                    self.visit(f"{name}.{key}", item, depth + 1)
            self._hooks(f"{name}.step_pre_hooks", thing._optimizer_step_pre_hooks, depth)
            self._hooks(f"{name}.step_post_hooks", thing._optimizer_step_post_hooks, depth)
        elif isinstance(thing, (LRScheduler, ReduceLROnPlateau)):
            self.found.schedulers.append((name, thing))
            self.visit(name + ".optimizer", thing.optimizer, depth + 1)
            for index, inner in enumerate(getattr(thing, "_schedulers", ())):  # of those that chain others
                self.visit(f"{name}.{index}", inner, depth + 1)
        elif isinstance(thing, GradScaler):
            self.found.scalers.append((name, thing))
            self._watch(vars(thing), name, grad_scaler.WATCHED)
            self.found.tensors |= {id(one): (f"{name}.{key}", one) for key, one in grad_scaler.tensors(thing)}
        elif isinstance(thing, (types.FunctionType, types.MethodType, functools.partial)):
            self._function(name, thing, depth)
        elif isinstance(thing, (list, tuple, set, frozenset, deque)):
            self._sequence(name, thing, depth)
        elif isinstance(thing, BUFFERS):
            self._buffer(name, thing)
        elif isinstance(thing, (dict, types.MappingProxyType)):
            self._watch(thing if isinstance(thing, dict) else ContentView(thing), name, None)
            for key, item in list(thing.items()):
                self.visit(f"{name}[{key!r}]", item, depth + 1)
        elif isinstance(thing, types.ModuleType) or not type(thing).__module__.startswith(NO_STATE):
            self._later.append((name, thing))
            self._classes.add(type(thing))
            for inside in (inside for kind, inside in _BEHIND if isinstance(thing, kind)):
                self.visit(f"{name}.{inside}", getattr(thing, inside), depth + 1)

    def finish(self) -> Reachable:
        """Walks plain objects and classes, whose attributes are looked at only by names that code uses."""
        looked: dict[int, int] = {}
        while True:
            todo = [(n, t) for n, t in self._later if looked.get(id(t)) != len(self._names)]
            behind = list(self._classes.found(self._names))
            if not todo and not behind:
                break
            for name, thing in behind:
                self.visit(name, thing, 1)
            for name, thing in todo:
                looked[id(thing)] = len(self._names)
                self._object(name, thing)
        for name, thing in self._later:
            names = self._names_for(thing)
            if hasattr(thing, "__dict__"):  # an empty one, too: an attribute may hide one of the class
                self._watch(vars(thing), name, tuple(sorted(names)))
            if own := names.intersection(slots(type(thing))):
                self._watch(SlotsView(thing), name, tuple(sorted(own)))
        for name, view in self._classes.views(self._names):
            self._watch(view, name, None)
        self._finish_schedulers()
        return self.found

    def _finish_schedulers(self) -> None:
        # The training loop moves a scheduler between calls; only code that reads it makes that matter.
        reads = {"get_last_lr", "get_lr", "_last_lr", "last_epoch", "_step_count"} & self._names
        for name, scheduler in self.found.schedulers:
            self._watch(vars(scheduler), name, None, guard=False)
            if reads:
                self._watch(vars(scheduler), name, ("last_epoch", "_step_count", "_last_lr"))

    def _watch(self, container: Any, path: str, keys: tuple[Any, ...] | None, *, guard: bool = True) -> None:
        watch = Snapshot(container, path, keys, guard=guard)
        watch.held = watch.now()
        self.found.snapshots.append(watch)

    def _sequence(self, name: str, thing: Any, depth: int) -> None:
        if isinstance(thing, (list, set, deque)):
            self._watch(thing if isinstance(thing, list) else ContentView(thing), name, None)
        if len(thing) > _MAX_ITEMS:
            return
        for index, item in enumerate(list(thing)):  # a thread may write to it meanwhile
            self.visit(f"{name}.{index}", item, depth + 1)

    def _buffer(self, name: str, thing: Any) -> None:
        num_bytes = thing.nbytes if hasattr(thing, "nbytes") else len(bytes(thing))
        if num_bytes > _MOST_BYTES:
            log.warning(
                "%s holds %s bytes: what is written to it between calls is not seen where the step reads it as numbers",
                name, f"{num_bytes:,}",
            )  # fmt: skip
            return
        self._watch(ContentView(thing), name, None)

    def _module(self, name: str, module: nn.Module, depth: int) -> None:
        self.found.modules[id(module)] = (name, module)
        for fqn, child in module.named_modules():
            path = f"{name}.{fqn}" if fqn else name
            self._seen.add(id(child))
            if is_compiled(child):
                self.found.compiled.append(path)
            if child is not module:
                self.found.modules.pop(id(child), None)
            for own in (child._parameters, child._buffers, child._modules):
                self._watch(own, path, None)
                self._seen.update(id(item) for item in own.values())
            self._watch(child.__dict__, path, None)
            for hooks in _HOOKS:
                # Which hooks take keywords: looked up for hooks that are there, by nobody else.
                read = hooks != "_forward_hooks_with_kwargs" or bool(child._forward_hooks)
                self._watch(getattr(child, hooks), f"{path}.{hooks}", None, guard=read)
                self._hooks(f"{path}.{hooks}", getattr(child, hooks), depth)
            for key, param in child._parameters.items():
                if param is not None:
                    self._on_tensor(f"{path}.{key}", param, depth)
            for key, item in list(child.__dict__.items()):
                if key not in _OWN_ATTRIBUTES:
                    self.visit(f"{path}.{key}", item, depth + 1)
            self._classes.add(type(child), whole=True)

    def _on_tensor(self, name: str, tensor: torch.Tensor, depth: int) -> None:
        """What hangs on a tensor: attributes that the user has set, and hooks."""
        self._watch(vars(tensor), name, None, guard=bool(vars(tensor)))
        for key, item in list(vars(tensor).items()):
            self.visit(f"{name}.{key}", item, depth + 1)
        self._hooks(f"hook of {name}", tensor._backward_hooks, depth)
        if tensor.is_leaf:
            self._hooks(f"hook of {name}", tensor._post_accumulate_grad_hooks, depth)

    def _hooks(self, name: str, hooks: Any, depth: int) -> None:
        for hook in (hooks or {}).values():
            self.visit(name, hook, depth + 1)

    def _function(self, name: str, thing: Any, depth: int) -> None:
        if isinstance(thing, functools.partial):
            self.visit(name, thing.func, depth + 1)
            self.visit(f"{name}.args", thing.args, depth + 1)
            self.visit(f"{name}.keywords", thing.keywords, depth + 1)
            return
        if isinstance(thing, types.MethodType):
            self.visit(name.rpartition(".")[0] or "self", thing.__self__, depth + 1)
            self.visit(name, thing.__func__, depth + 1)
            return
        self._seen.add(id(thing))
        if is_compiled(thing):
            self.found.compiled.append(name)
        if hasattr(thing, "__wrapped__"):  # a decorator such as torch.no_grad()
            self.visit(name, thing.__wrapped__, depth + 1)
        if not is_user_code(thing):
            return
        self.found.codes += _codes(thing.__code__)
        names = {n for code in _codes(thing.__code__) for n in _names(code)}
        self._names |= names
        used = tuple(sorted(n for n in names if n in thing.__globals__ and not n.startswith("__")))
        if used:
            self._watch(thing.__globals__, f"globals of {thing.__module__}", used)
        for key in used:
            self.visit(key, thing.__globals__[key], depth + 1)
        for key, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True):
            self._cell(key, cell, depth)
        self.visit(f"{name} defaults", thing.__defaults__ or (), depth + 1)
        self.visit(f"{name} defaults", thing.__kwdefaults__ or {}, depth + 1)

    def _cell(self, key: str, cell: types.CellType, depth: int) -> None:
        try:
            content = cell.cell_contents
        except ValueError:  # the variable is not assigned yet
            return
        self._watch(CellView(cell, key), "closure", (key,))
        self.visit(key, content, depth + 1)

    def _object(self, name: str, thing: Any) -> None:
        names = self._names_for(thing)
        for key in [*getattr(thing, "__dict__", ()), *slots(type(thing))]:
            if key in names and hasattr(thing, key):
                self.visit(f"{name}.{key}", getattr(thing, key), 1)

    def _names_for(self, thing: Any) -> frozenset[str]:
        """Names of attributes of a plain object that matter."""
        kind = type(thing)
        if kind not in self._of_library:
            self._of_library[kind] = _names_in_library(kind)
        return self._of_library[kind] | self._names


def _is_users_module(thing: Any) -> bool:
    """Whether a thing is a file of Python that the user has written: a constant in it is like a global."""
    return isinstance(thing, types.ModuleType) and is_user_file(getattr(thing, "__file__", None) or "")


def find_reachable(step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reachable:
    """Everything that a call ``step(*args, **kwargs)`` can reach.

    Tensors in the arguments themselves are left out: they are the inputs of the call.
    """
    walker = Walker()
    try:
        names = list(inspect.signature(step).bind_partial(*args).arguments)
    except (TypeError, ValueError):
        names = []
    flat = [(names[i] if i < len(names) else f"args.{i}", arg) for i, arg in enumerate(args)] + list(kwargs.items())
    for name, arg in flat:
        for leaf_name, leaf in _holders(name, arg):
            walker.visit(leaf_name, leaf)
        for kind in tree_util.classes(arg):
            walker.visit(kind.__name__, kind)
    walker.visit(getattr(step, "__name__", "step"), step)
    for hooks in GLOBAL_HOOKS:
        walker._hooks("hook of every module", hooks, 0)
    return walker.finish()


def _holders(name: str, arg: Any) -> Iterator[tuple[str, Any]]:
    """The things in an argument that outlive the call: modules, optimizers, and objects that hold them.

    Whatever `tree.flatten` takes apart, containers and objects that hold tensors, is data of this call.
    """
    for keys, leaf in tree_util.leaves_with_keys(arg):
        if not isinstance(leaf, (torch.Tensor, *SCALARS)):
            yield ".".join([name, *map(str, keys)]), leaf
