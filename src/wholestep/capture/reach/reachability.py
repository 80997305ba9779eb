"""Finds everything a step can reach: modules, optimizers, tensors, and Python values.

[Note: what is watched]
Tracing runs the step's Python once. Every Python value it read is frozen in the graph, so each must be
looked at again before the graph is used again. Roots are the arguments, ``self``, closure cells and the
globals that the step's code names, followed through user functions, modules, containers and objects.
- A *watch* holds one dict or list (or set, deque, array) with what it held while tracing. It serves twice: after the
  trace it shows side effects (refused), before each call it shows what changed (retraced).
- Attributes of modules are watched whole. Other objects, the files of Python that the user has written among them,
  are watched only in the attributes whose names occur in code that the step can reach, so a counter that the training
  loop moves does not retrace. What a trace comes to by other names, the next one watches
  (`capture/python/attribute_access.py`). Classes: `wholestep.capture.python.class_attributes`.
- What has a state that nobody can look at, such as an iterator of C, is refused (`rng_and_iterators.py`).
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from wholestep.capture.python import code_names, tree_util
from wholestep.capture.python.attribute_access import WatchedObject
from wholestep.capture.python.class_attributes import ClassAttributes
from wholestep.capture.python.code_owner import (
    Owner,
    is_library_class,
    is_user_code,
    is_user_file,
    is_writable,
    owner_of_class,
)
from wholestep.capture.python.container_views import (
    BUFFERS,
    OBJECT_PARTS,
    CellView,
    ContentView,
    PartsView,
    SlotsView,
    held_by,
    own_dict,
    slots,
)
from wholestep.capture.python.snapshot import SCALARS, Snapshot
from wholestep.capture.reach import grad_scaler, library_globals, module_hooks, rng_and_iterators
from wholestep.capture.reach.arguments import holders
from wholestep.capture.reach.reachable import Reachable
from wholestep.capture.reach.unwrap_compiled import is_compiled
from wholestep.capture.reach.watched_names import SCHEDULERS, HiddenThings, WatchedNames
from wholestep.capture.scalars import hyperparameters
from wholestep.capture.wrappers import ddp, fully_shard_hooks, fully_shard_settings
from wholestep.util.gradient_node import is_leaf

log = logging.getLogger("wholestep")

_MAX_DEPTH = 12
_MAX_ITEMS = 4096
_MOST_BYTES = 1 << 20  # of numbers that every call compares
_OPAQUE = (types.ModuleType, type, torch.Generator, torch.Size)
_OWN_ATTRIBUTES = frozenset(nn.Module().__dict__)


class Walker:
    """Walks from a step to everything it can reach; used once."""

    def __init__(
        self, observed: Collection[str | type] = (), read: Mapping[int, Collection[str]] | None = None
    ) -> None:
        """`observed`: names that no code has and that a trace has used, and classes of objects that it read whole.

        `read`: by id of objects all that a trace has asked them for, and nothing else is looked at.
        """
        self.reachable = Reachable()
        self._hidden = HiddenThings(self.reachable.hidden)
        self._seen = self.reachable.seen
        self._alive: list[Any] = []  # ids in _seen stay valid while their objects live
        self._watched = WatchedNames(observed, read or {})
        self._names = self._watched.names
        self._objects: list[tuple[str, Any]] = []
        self._libraries: dict[int, tuple[str, types.ModuleType]] = {}
        self._classes = ClassAttributes()

    def visit(self, name: str, thing: Any, depth: int = 0) -> None:
        """Walks to one reachable thing, once: the first handler of `HANDLERS` whose type it has does the rest."""
        thing = tree_util.behind_proxy(thing)
        if isinstance(thing, type) and not is_library_class(thing):
            self._classes.add(thing, called=name != "__class__")  # by which a method comes to ``super()``
        has_attributes = own_dict(thing) is not None
        if (isinstance(thing, SCALARS) and not has_attributes) or id(thing) in self._seen:
            return self._hidden.again(thing)
        if depth > _MAX_DEPTH:
            return self._hidden.add(name, thing, "which lies too deep to be looked at")
        if isinstance(thing, rng_and_iterators.KINDS):
            self.reachable.generators[id(thing)] = (name, thing)
        if isinstance(thing, _OPAQUE) and not _is_users_module(thing):
            if isinstance(thing, types.ModuleType):
                self._libraries[id(thing)] = (name, thing)
            return
        self._seen.add(id(thing))
        self._alive.append(thing)
        if hasattr(type(thing), "__next__"):
            self.reachable.iterators[id(thing)] = name
        if why := rng_and_iterators.why_hidden(thing):
            self._hidden.add(name, thing, why)
        with self._hidden.within(thing):
            next(handler for kind, handler in HANDLERS if isinstance(thing, kind))(self, name, thing, depth)
            if has_attributes and isinstance(thing, _ALSO_OBJECTS):
                self._plain_object(name, thing, depth)

    def finish(self) -> Reachable:
        """Walks plain objects and classes, whose attributes are looked at only by names that code uses."""
        num_names: dict[int, int] = {}
        while True:
            for name, library in list(self._libraries.values()):
                for key, held in library_globals.things_named(library, self._names):
                    self.visit(f"{name}.{key}", held, 1)
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
            names, own = self._watched.of(thing), [*slots(type(thing))]
            self._watch_parts(name, thing)
            self.reachable.objects[id(thing)] = WatchedObject(thing, self._watched.known(thing))
            if (held := own_dict(thing)) is not None:  # an empty one, too: it may come to hide one of the class
                self._watch(held, name, None if names is None else tuple(sorted(names)))
            if own := [key for key in own if names is None or key in names]:
                self._watch(SlotsView(thing), name, tuple(sorted(own)))
        for name, library in self._libraries.values():  # a function of theirs may be exchanged, too
            if named := sorted(self._names & {*vars(library)}):
                self._watch(vars(library), name, tuple(named))
        for name, view in self._classes.views(self._names):
            self._watch(view, name, None)
        return self.reachable

    def _watch_parts(self, name: str, thing: Any) -> None:
        if is_writable(type(thing)):
            self._watch(PartsView(thing), name, OBJECT_PARTS)

    def _watch(
        self, container: Any, path: str, keys: tuple[Any, ...] | None, *, guard: bool = True, ordered: bool = False
    ) -> None:
        snapshot = Snapshot(container, path, keys, guard=guard, ordered=ordered)
        snapshot.held = snapshot.now()
        self.reachable.snapshots.append(snapshot)

    # Handlers, one for each row of `HANDLERS`.

    def _loose_tensor(self, name: str, tensor: torch.Tensor, depth: int) -> None:
        self.reachable.tensors[id(tensor)] = (name, tensor)
        self._tensor(name, tensor, depth)

    def _settings(self, name: str, wrapper: DistributedDataParallel) -> None:
        """The rest of what a wrapper holds moves with its eager calls."""
        self.reachable.wrappers[id(wrapper)] = (name, wrapper)
        self._watch(vars(wrapper), name, ddp.settings_of_trace(wrapper))
        self._watch(ddp.facts_of_reducer(wrapper), name, None)
        self._watch(wrapper._comm_hooks, f"{name}._comm_hooks", None)

    def _module(self, name: str, module: nn.Module, depth: int) -> None:
        if isinstance(module, DistributedDataParallel):  # names of parameters are those of the module inside
            self._hooks_of(module, name, depth)
            self._settings(name, module)
            return self.visit(name, module.module, depth)
        self.reachable.modules[id(module)] = (name, module)
        for fqn, child in module.named_modules():
            path = f"{name}.{fqn}" if fqn else name
            self._seen.add(id(child))
            self.reachable.compiled += [path] if is_compiled(child) else []
            if child is not module:
                self.reachable.modules.pop(id(child), None)
            for own in (child._parameters, child._buffers, child._modules):
                self._watch(own, path, None)
                self._seen.update(id(item) for item in own.values())
            for settings, keys in fully_shard_settings.watched(path, child, is_root=child is module):
                self._watch(settings, path, keys)
            self._hooks_of(child, path, depth)
            if isinstance(child, DistributedDataParallel):
                self._settings(path, child)
                continue
            self._watch(child.__dict__, path, None)
            self._watch_parts(path, child)
            for key, param in child._parameters.items():
                if param is not None:
                    self._tensor(f"{path}.{key}", param, depth)
            for key, item in list(child.__dict__.items()):
                if key not in _OWN_ATTRIBUTES:
                    self.visit(f"{path}.{key}", item, depth + 1)
            self._classes.add(type(child), whole=True)

    def _hooks_of(self, module: nn.Module, path: str, depth: int) -> None:
        for name, hooks, is_read in module_hooks.of(module):
            self._watch(hooks, f"{path}.{name}", None, guard=is_read)
            self.visit_hooks(f"{path}.{name}", hooks, depth)

    def _optimizer(self, name: str, opt: Optimizer, depth: int) -> None:
        if "_optimizer_step_pre_hooks" not in vars(opt):  # around another one, as accelerate and Lightning have it
            return self._plain_object(name, opt, depth)
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
        self._watch(vars(scheduler), name, None, guard=False)  # for what the step itself moves
        self._plain_object(name, scheduler, depth)

    def _scaler(self, name: str, scaler: GradScaler, depth: int) -> None:
        self.reachable.scalers.append((name, scaler))
        self._watched.leave_out(scaler, grad_scaler.NOTES)
        self.reachable.tensors |= {id(one): (f"{name}.{key}", one) for key, one in grad_scaler.tensors(scaler)}
        self._plain_object(name, scaler, depth)

    def _partial(self, name: str, thing: functools.partial[Any], depth: int) -> None:
        self.visit(name, thing.func, depth + 1)
        self.visit(f"{name}.args", thing.args, depth + 1)
        self.visit(f"{name}.keywords", thing.keywords, depth + 1)

    def _method(self, name: str, method: types.MethodType, depth: int) -> None:
        self.visit(name.rpartition(".")[0] or "self", method.__self__, depth + 1)
        self.visit(name, method.__func__, depth + 1)

    def _reference(self, name: str, reference: weakref.ReferenceType[Any], depth: int) -> None:
        self.visit(name, reference(), depth + 1)

    def _cache(self, name: str, function: Any, depth: int) -> None:
        self.reachable.caches.append((name, function))
        self.visit(name, function.__wrapped__, depth + 1)

    def _native_method(self, name: str, method: Any, depth: int) -> None:
        self.visit(name.rpartition(".")[0] or name, method.__self__, depth + 1)

    def _function(self, name: str, function: types.FunctionType, depth: int) -> None:
        if is_compiled(function):
            self.reachable.compiled.append(name)
        if hasattr(function, "__wrapped__"):  # a decorator such as torch.no_grad()
            self.visit(name, function.__wrapped__, depth + 1)
        if not is_user_code(function):
            if read := library_globals.numbers_read(function):
                self._watch(function.__globals__, f"globals of {function.__module__}", read)
            return
        self._watch(vars(function), name, None)
        self._watch(SlotsView(function), name, code_names.FUNCTION_PARTS)
        for key, item in list(vars(function).items()):
            self.visit(f"{name}.{key}", item, depth + 1)
        self.reachable.add_code(function)
        self._names |= {n for code in code_names.codes(function.__code__) for n in code_names.names(code)}
        used = tuple(sorted(n for n in code_names.globals_of(function) if not n.startswith("__")))
        if used:
            self._watch(function.__globals__, f"globals of {function.__module__}", used)
        for key in used:
            self.visit(key, function.__globals__.get(key), depth + 1)
        for key in (key for code in code_names.codes(function.__code__) for key in code_names.imported(code)):
            self.visit(key, sys.modules.get(key), depth + 1)
        for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._cell(key, cell, depth)
        self.visit(f"{name} defaults", function.__defaults__ or (), depth + 1)
        self.visit(f"{name} defaults", function.__kwdefaults__ or {}, depth + 1)

    def _sequence(self, name: str, items: Any, depth: int) -> None:
        if isinstance(items, (list, set, deque)):
            self._watch(items if isinstance(items, list) else ContentView(items), name, None)
        if len(items) > _MAX_ITEMS:
            if not all(isinstance(one, SCALARS) for one in list(items)):
                self._hidden.add(name, items, f"of {len(items):,} things, too many to be looked at")
            return
        for index, item in enumerate(list(items)):  # a thread may write to it meanwhile
            self.visit(f"{name}.{index}", item, depth + 1)

    def _buffer(self, name: str, buffer: Any, depth: int) -> None:
        num_bytes = buffer.nbytes if hasattr(buffer, "nbytes") else len(bytes(buffer))
        if num_bytes > _MOST_BYTES:
            why = f"of {num_bytes:,} bytes, too many to be compared at every call"
            return self._hidden.add(name, buffer, why)
        self._watch(ContentView(buffer), name, None)

    def _mapping(self, name: str, mapping: Any, depth: int) -> None:
        own = isinstance(mapping, dict)
        self._watch(mapping if own else ContentView(mapping), name, None, ordered=own)
        for key, item in list(mapping.items()):
            self.visit(f"{name}[{key!r}]", item, depth + 1)

    def _plain_object(self, name: str, thing: Any, depth: int) -> None:
        """An object, a class instance or a file of Python, whose attributes `finish` walks."""
        if owner_of_class(type(thing)) is Owner.OURS or fully_shard_hooks.state_text(thing) is not None:
            return  # of `fully_shard` what matters is watched as its settings; the rest the last eager call has left
        self._objects.append((name, thing))
        self._classes.add(type(thing))

    def _tensor(self, name: str, tensor: torch.Tensor, depth: int) -> None:
        """What hangs on a tensor: attributes that the user has set, and hooks."""
        self._watch(vars(tensor), name, None, guard=bool(vars(tensor)))
        for key, item in list(vars(tensor).items()):
            self.visit(f"{name}.{key}", item, depth + 1)
        self.visit_hooks(f"hook of {name}", tensor._backward_hooks, depth)
        if is_leaf(tensor):
            self.visit_hooks(f"hook of {name}", tensor._post_accumulate_grad_hooks, depth)

    def visit_hooks(self, name: str, hooks: Any, depth: int = 0) -> None:
        """Walks to hooks, the values of a dict or of None."""
        for hook in (hooks or {}).values():
            self.visit(name, hook, depth + 1)

    def visit_global_hooks(self) -> None:
        """Walks to the hooks of all modules and optimizers."""
        for name, hooks in module_hooks.GLOBAL_HOOKS.items():
            self._watch(hooks, f"torch.{name}", None)
            self.visit_hooks(f"torch.{name}", hooks)

    def _cell(self, key: str, cell: types.CellType, depth: int) -> None:
        view = CellView(cell, key)
        self._watch(view, "closure", (key,))
        if key in view:
            self.visit(key, view[key], depth + 1)

    def _attributes(self, name: str, thing: Any) -> None:
        for key, held in held_by(thing, self._watched.of(thing)):
            with self._hidden.under(thing, key):
                self.visit(f"{name}.{key}", held, 1)


_ALSO_OBJECTS = (functools.partial, list, tuple, set, frozenset, deque, dict, *BUFFERS)
"""Kinds with a handler of their own. An object of a class made of them, or with room for attributes, has those, too."""

Handler = Callable[[Walker, str, Any, int], None]

HANDLERS: tuple[tuple[type | tuple[type, ...], Handler], ...] = (
    (torch.Tensor, Walker._loose_tensor),
    (nn.Module, Walker._module),
    (Optimizer, Walker._optimizer),
    (SCHEDULERS, Walker._scheduler),
    (GradScaler, Walker._scaler),
    (types.FunctionType, Walker._function),
    (types.MethodType, Walker._method),
    (functools.partial, Walker._partial),
    (weakref.ReferenceType, Walker._reference),
    (type(functools.lru_cache(len)), Walker._cache),
    ((types.BuiltinMethodType, types.MethodWrapperType), Walker._native_method),
    ((list, tuple, set, frozenset, deque), Walker._sequence),
    (BUFFERS, Walker._buffer),
    ((dict, types.MappingProxyType), Walker._mapping),
    (object, Walker._plain_object),
)
"""What is done at a thing of a type. The first row that fits counts: a tensor is an object, too."""


def _is_users_module(thing: Any) -> bool:
    """Whether a thing is a file of Python that the user has written: a constant in it is like a global."""
    return isinstance(thing, types.ModuleType) and is_user_file(getattr(thing, "__file__", None) or "")


def find_reachable(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    observed: Collection[str | type] = (),
    read: Mapping[int, Collection[str]] | None = None,
) -> Reachable:
    """Everything that a call ``step(*args, **kwargs)`` can reach. `observed`, `read`: as `Walker` takes them.

    Tensors in the arguments themselves are left out: they are the inputs of the call.
    """
    walker = Walker(observed, read)
    try:
        names = list(inspect.signature(step).bind_partial(*args).arguments)
    except (TypeError, ValueError):
        names = []
    flat = [(names[i] if i < len(names) else f"args.{i}", arg) for i, arg in enumerate(args)] + list(kwargs.items())
    for name, arg in flat:
        for leaf_name, leaf in holders(name, arg):
            walker.visit(leaf_name, leaf)
        for kind in tree_util.classes(arg):
            walker.visit(kind.__name__, kind)
    walker.visit(getattr(step, "__name__", "step"), step)
    walker.visit_global_hooks()
    return walker.finish()
