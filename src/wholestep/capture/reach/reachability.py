"""Finds everything a step can reach: modules, optimizers, tensors, and Python values.

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
from wholestep.capture.python.code_owner import (
    LOOKED_THROUGH,
    is_library_class,
    is_user_class,
    is_user_code,
    is_user_file,
    owner_of_class,
)
from wholestep.capture.python.container_views import BUFFERS, CellView, ContentView, SlotsView, slots
from wholestep.capture.python.snapshot import SCALARS, Snapshot
from wholestep.capture.reach import grad_scaler, rng_and_iterators
from wholestep.capture.reach.unwrap_compiled import is_compiled
from wholestep.capture.scalars import hyperparameters

log = logging.getLogger("wholestep")

_MAX_DEPTH = 12
_MAX_ITEMS = 4096  # what a longer list holds is data, not structure
_MOST_BYTES = 1 << 20  # of numbers that every call compares
_WRAPPED_CONTAINERS = ((UserDict, "data"), (UserList, "data"), (ChainMap, "maps"))
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
    """Everything that a step can reach, with the names under which it does."""

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
    """Walks from a step to everything it can reach; used once."""

    def __init__(self) -> None:
        self.reachable = Reachable()
        self._seen: set[int] = set()
        self._alive: list[Any] = []  # ids in _seen stay valid while their objects live
        self._names: set[str] = set(CALLED_BY_TORCH)
        self._library_names: dict[type, frozenset[str]] = {}
        self._objects: list[tuple[str, Any]] = []
        self._classes = ClassAttributes()

    def visit(self, name: str, thing: Any, depth: int = 0) -> None:
        """Walks to one reachable thing, once: the first handler of `HANDLERS` whose type it has does the rest."""
        if isinstance(thing, type) and not is_library_class(thing):
            self._classes.add(thing)
        if isinstance(thing, SCALARS) or depth > _MAX_DEPTH or id(thing) in self._seen:
            return
        if isinstance(thing, rng_and_iterators.KINDS):
            self.reachable.generators[id(thing)] = (name, thing)
        if isinstance(thing, _OPAQUE) and not _is_users_module(thing):
            return
        self._seen.add(id(thing))
        self._alive.append(thing)
        if hasattr(type(thing), "__next__"):
            self.reachable.iterators[id(thing)] = name
        next(handler for kind, handler in HANDLERS if isinstance(thing, kind))(self, name, thing, depth)

    def finish(self) -> Reachable:
        """Walks plain objects and classes, whose attributes are looked at only by names that code uses."""
        num_names: dict[int, int] = {}
        while True:
            objects = [(n, t) for n, t in self._objects if num_names.get(id(t)) != len(self._names)]
            attributes = list(self._classes.values_under(self._names))
            if not objects and not attributes:
                break
            for name, thing in attributes:
                self.visit(name, thing, 1)
            for name, thing in objects:
                num_names[id(thing)] = len(self._names)
                self._attributes(name, thing)
        for name, thing in self._objects:
            names = self._names_for(thing)
            if hasattr(thing, "__dict__"):  # an empty one, too: an attribute may hide one of the class
                self._watch(vars(thing), name, tuple(sorted(names)))
            if own := names.intersection(slots(type(thing))):
                self._watch(SlotsView(thing), name, tuple(sorted(own)))
        for name, view in self._classes.views(self._names):
            self._watch(view, name, None)
        self._finish_schedulers()
        return self.reachable

    def _finish_schedulers(self) -> None:
        # The training loop moves a scheduler between calls; only code that reads it makes that matter.
        reads = {"get_last_lr", "get_lr", "_last_lr", "last_epoch", "_step_count"} & self._names
        for name, scheduler in self.reachable.schedulers:
            self._watch(vars(scheduler), name, None, guard=False)
            if reads:
                self._watch(vars(scheduler), name, ("last_epoch", "_step_count", "_last_lr"))

    def _watch(self, container: Any, path: str, keys: tuple[Any, ...] | None, *, guard: bool = True) -> None:
        snapshot = Snapshot(container, path, keys, guard=guard)
        snapshot.held = snapshot.now()
        self.reachable.snapshots.append(snapshot)

    # Handlers, one for each row of `HANDLERS`.

    def _loose_tensor(self, name: str, tensor: torch.Tensor, depth: int) -> None:
        self.reachable.tensors[id(tensor)] = (name, tensor)
        self._tensor(name, tensor, depth)

    def _module(self, name: str, module: nn.Module, depth: int) -> None:
        self.reachable.modules[id(module)] = (name, module)
        for fqn, child in module.named_modules():
            path = f"{name}.{fqn}" if fqn else name
            self._seen.add(id(child))
            if is_compiled(child):
                self.reachable.compiled.append(path)
            if child is not module:
                self.reachable.modules.pop(id(child), None)
            for own in (child._parameters, child._buffers, child._modules):
                self._watch(own, path, None)
                self._seen.update(id(item) for item in own.values())
            self._watch(child.__dict__, path, None)
            for hooks in _HOOKS:
                # Which hooks take keywords: looked up for hooks that are there, by nobody else.
                read = hooks != "_forward_hooks_with_kwargs" or bool(child._forward_hooks)
                self._watch(getattr(child, hooks), f"{path}.{hooks}", None, guard=read)
                self.visit_hooks(f"{path}.{hooks}", getattr(child, hooks), depth)
            for key, param in child._parameters.items():
                if param is not None:
                    self._tensor(f"{path}.{key}", param, depth)
            for key, item in list(child.__dict__.items()):
                if key not in _OWN_ATTRIBUTES:
                    self.visit(f"{path}.{key}", item, depth + 1)
            self._classes.add(type(child), whole=True)

    def _optimizer(self, name: str, opt: Optimizer, depth: int) -> None:
        if is_wrapper(opt):
            self._plain_object(name, opt, depth)
            return
        self.reachable.optimizers[id(opt)] = (name, opt)
        self._classes.add(type(opt))
        for key, item in list(vars(opt).items()):
            if key not in hyperparameters.torch_group_keys():
                self.visit(f"{name}.{key}", item, depth + 1)
        self.visit_hooks(f"{name}.step_pre_hooks", opt._optimizer_step_pre_hooks, depth)
        self.visit_hooks(f"{name}.step_post_hooks", opt._optimizer_step_post_hooks, depth)

    def _scheduler(self, name: str, scheduler: Any, depth: int) -> None:
        self.reachable.schedulers.append((name, scheduler))
        self.visit(name + ".optimizer", scheduler.optimizer, depth + 1)
        for index, inner in enumerate(getattr(scheduler, "_schedulers", ())):  # of those that chain others
            self.visit(f"{name}.{index}", inner, depth + 1)

    def _scaler(self, name: str, scaler: GradScaler, depth: int) -> None:
        self.reachable.scalers.append((name, scaler))
        self._watch(vars(scaler), name, grad_scaler.WATCHED)
        self.reachable.tensors |= {id(one): (f"{name}.{key}", one) for key, one in grad_scaler.tensors(scaler)}

    def _partial(self, name: str, thing: functools.partial[Any], depth: int) -> None:
        self.visit(name, thing.func, depth + 1)
        self.visit(f"{name}.args", thing.args, depth + 1)
        self.visit(f"{name}.keywords", thing.keywords, depth + 1)

    def _method(self, name: str, method: types.MethodType, depth: int) -> None:
        self.visit(name.rpartition(".")[0] or "self", method.__self__, depth + 1)
        self.visit(name, method.__func__, depth + 1)

    def _function(self, name: str, function: types.FunctionType, depth: int) -> None:
        if is_compiled(function):
            self.reachable.compiled.append(name)
        if hasattr(function, "__wrapped__"):  # a decorator such as torch.no_grad()
            self.visit(name, function.__wrapped__, depth + 1)
        if not is_user_code(function):
            return
        self.reachable.codes += _codes(function.__code__)
        names = {n for code in _codes(function.__code__) for n in _names(code)}
        self._names |= names
        used = tuple(sorted(n for n in names if n in function.__globals__ and not n.startswith("__")))
        if used:
            self._watch(function.__globals__, f"globals of {function.__module__}", used)
        for key in used:
            self.visit(key, function.__globals__[key], depth + 1)
        for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._cell(key, cell, depth)
        self.visit(f"{name} defaults", function.__defaults__ or (), depth + 1)
        self.visit(f"{name} defaults", function.__kwdefaults__ or {}, depth + 1)

    def _sequence(self, name: str, items: Any, depth: int) -> None:
        if isinstance(items, (list, set, deque)):
            self._watch(items if isinstance(items, list) else ContentView(items), name, None)
        if len(items) > _MAX_ITEMS:
            return
        for index, item in enumerate(list(items)):  # a thread may write to it meanwhile
            self.visit(f"{name}.{index}", item, depth + 1)

    def _buffer(self, name: str, buffer: Any, depth: int) -> None:
        num_bytes = buffer.nbytes if hasattr(buffer, "nbytes") else len(bytes(buffer))
        if num_bytes > _MOST_BYTES:
            log.warning(
                "%s holds %s bytes: what is written to it between calls is not seen where the step reads it as numbers",
                name, f"{num_bytes:,}",
            )  # fmt: skip
            return
        self._watch(ContentView(buffer), name, None)

    def _mapping(self, name: str, mapping: Any, depth: int) -> None:
        self._watch(mapping if isinstance(mapping, dict) else ContentView(mapping), name, None)
        for key, item in list(mapping.items()):
            self.visit(f"{name}[{key!r}]", item, depth + 1)

    def _plain_object(self, name: str, thing: Any, depth: int) -> None:
        """An object, a class instance or a file of Python, whose attributes `finish` walks."""
        if owner_of_class(type(thing)) in LOOKED_THROUGH:
            return
        self._objects.append((name, thing))
        self._classes.add(type(thing))
        for key in (key for kind, key in _WRAPPED_CONTAINERS if isinstance(thing, kind)):
            self.visit(f"{name}.{key}", getattr(thing, key), depth + 1)

    def _tensor(self, name: str, tensor: torch.Tensor, depth: int) -> None:
        """What hangs on a tensor: attributes that the user has set, and hooks."""
        self._watch(vars(tensor), name, None, guard=bool(vars(tensor)))
        for key, item in list(vars(tensor).items()):
            self.visit(f"{name}.{key}", item, depth + 1)
        self.visit_hooks(f"hook of {name}", tensor._backward_hooks, depth)
        if tensor.is_leaf:
            self.visit_hooks(f"hook of {name}", tensor._post_accumulate_grad_hooks, depth)

    def visit_hooks(self, name: str, hooks: Any, depth: int = 0) -> None:
        """Walks to hooks, the values of a dict or of None."""
        for hook in (hooks or {}).values():
            self.visit(name, hook, depth + 1)

    def _cell(self, key: str, cell: types.CellType, depth: int) -> None:
        try:
            content = cell.cell_contents
        except ValueError:  # the variable is not assigned yet
            return
        self._watch(CellView(cell, key), "closure", (key,))
        self.visit(key, content, depth + 1)

    def _attributes(self, name: str, thing: Any) -> None:
        names = self._names_for(thing)
        for key in [*getattr(thing, "__dict__", ()), *slots(type(thing))]:
            if key in names and hasattr(thing, key):
                self.visit(f"{name}.{key}", getattr(thing, key), 1)

    def _names_for(self, thing: Any) -> frozenset[str]:
        """Names of attributes of a plain object that matter."""
        kind = type(thing)
        if kind not in self._library_names:
            self._library_names[kind] = _names_in_library(kind)
        return self._library_names[kind] | self._names


Handler = Callable[[Walker, str, Any, int], None]

HANDLERS: tuple[tuple[type | tuple[type, ...], Handler], ...] = (
    (torch.Tensor, Walker._loose_tensor),
    (nn.Module, Walker._module),
    (Optimizer, Walker._optimizer),
    ((LRScheduler, ReduceLROnPlateau), Walker._scheduler),
    (GradScaler, Walker._scaler),
    (types.FunctionType, Walker._function),
    (types.MethodType, Walker._method),
    (functools.partial, Walker._partial),
    ((list, tuple, set, frozenset, deque), Walker._sequence),
    (BUFFERS, Walker._buffer),
    ((dict, types.MappingProxyType), Walker._mapping),
    (object, Walker._plain_object),
)
"""What is done at a thing of a type. The first row that fits counts: a tensor is an object, too."""


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
        walker.visit_hooks("hook of every module", hooks)
    return walker.finish()


def _holders(name: str, arg: Any) -> Iterator[tuple[str, Any]]:
    """The things in an argument that outlive the call: modules, optimizers, and objects that hold them.

    Whatever `tree.flatten` takes apart, containers and objects that hold tensors, is data of this call.
    """
    for keys, leaf in tree_util.leaves_with_keys(arg):
        if not isinstance(leaf, (torch.Tensor, *SCALARS)):
            yield ".".join([name, *map(str, keys)]), leaf
