"""The fingerprint of objects: everything a trace depends on as lines of text that another process can compare.

[Note: object fingerprints]
Guards compare live objects with those of the trace, most of them by identity, which means nothing in another process.
There a fingerprint stands in for it: a scalar is its value, a function its code, a container its contents, a tensor its
layout, and what comes up again is the number of its first appearance, so that two things which were one are one again.
What cannot be told from outside is refused, never guessed: a step that reaches such a thing is captured in every
process.
Like guards, a fingerprint shows of the user's own objects those attributes that the step's code names; of objects whose
code the walk does not read (libraries) it shows all.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import io
import logging
import pathlib
import re
import threading
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from wholestep.api.cache.code_text import digest_of_code, named_in_library, read_by_functions, shortened
from wholestep.api.cache.put_in_libraries import put_in_libraries
from wholestep.capture.functionalize.alias_checks import overlaps
from wholestep.capture.functionalize.storage_resize import num_bytes
from wholestep.capture.guards.size_guards import any_size
from wholestep.capture.guards.tensor_layout import describe, first_aliases
from wholestep.capture.python.class_attributes import functions_in
from wholestep.capture.python.code_owner import Owner, is_user_class, owner_of_function
from wholestep.capture.python.container_views import BUFFERS, ClassView, ContentView, SlotsView, slots
from wholestep.capture.python.snapshot import SCALARS, Snapshot
from wholestep.capture.reach.library_globals import belong_to_library, is_users
from wholestep.capture.reach.module_hooks import GLOBAL_HOOKS
from wholestep.capture.reach.step_context import StepContext
from wholestep.capture.scalars.rank_symbols import ranks
from wholestep.capture.wrappers.fully_shard_hooks import is_bookkeeping, key_text, lies_in_state, state_text
from wholestep.util.torch_switches import torch_modes

Line = tuple[str, str]
"""One fact: its name and its value."""

_MAX_OBJECTS = 200_000  # objects in one fingerprint

_VALUES = (
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
    range, slice, re.Pattern, pathlib.PurePath, Fraction, Decimal, date, time, timedelta, np.generic, np.dtype,
)  # fmt: skip
"""Kinds of values that their ``repr`` tells apart."""
_IGNORED = (
    logging.Logger, logging.Handler, io.IOBase, type(threading.Lock()), type(threading.RLock()), threading.Thread,
    threading.Event, threading.Condition, torch.utils.data.DataLoader, torch.utils.data.Dataset,
)  # fmt: skip
"""Kinds of objects that no arithmetic of a step depends on, or that the walk does not look into either."""
_SCHEDULERS = (LRScheduler, ReduceLROnPlateau)
_BUILT_IN = (
    types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType, types.GetSetDescriptorType,
    types.MemberDescriptorType, types.ClassMethodDescriptorType, types.MethodWrapperType,
    torch._ops.OpOverload, torch._ops.OpOverloadPacket,
)  # fmt: skip
_MODULE_ATTRIBUTES = frozenset(nn.Module().__dict__) - {"training"}
"""Containers that have snapshots of their own."""
_HOOK_TABLES = frozenset(name for name in _MODULE_ATTRIBUTES if "_hooks" in name) | GLOBAL_HOOKS.keys()
"""Those of them whose keys are numbers of hooks, and those for all modules."""

_OPTIMIZER_ATTRIBUTES = frozenset({
    "state", "param_groups", "defaults", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_opt_called",
    "_step_count",
})  # fmt: skip
"""Attributes that are described otherwise, or in which optimizers and schedulers count for their warnings."""


class NotComparable(Exception):
    """Names an object that a step can reach and that another process could not compare."""


def mode_lines() -> list[Line]:
    """The global switches of torch as they are now."""
    return [(f"the mode {name}", str(value)) for name, value in torch_modes()]


def object_fingerprint(context: StepContext, options: Mapping[str, Any]) -> list[Line]:
    """Everything a trace in this context depends on, in an order that is the same in every process.

    `options` are further objects to describe, by name. Raises NotComparable.
    """
    writer = _ObjectWriter(context)
    lines = mode_lines()
    lines += [(f"the group {one.axis.name}", f"{one.axis}, rank {'any' if one.axis.ranks is None else one.number}")
              for one in ranks()]  # fmt: skip
    lines += writer.arguments()
    lines += [(f"the code of {code.co_qualname}", digest_of_code(code)) for code in context.reachable.codes]
    lines += writer.optimizers()
    for group in context.lifter.snapshots:
        lines += writer.snapshot(group)
    lines += writer.state()
    for snapshot in context.reachable.snapshots:
        # Where the thing itself comes up.
        covered = isinstance(snapshot.container, (ContentView, SlotsView)) or lies_in_state(snapshot.path)
        if not covered and snapshot.guard:
            lines += writer.snapshot(snapshot)
    for where, thing in read_by_functions(put_in_libraries()):
        lines.append((where, writer.described(where, thing)))
    return [*lines, *((name, writer.described(name, thing)) for name, thing in options.items())]


class _ObjectWriter:
    """Describes objects as text, each once: what comes up again is its number."""

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self._numbers: dict[int, int] = {}
        self._hooks: dict[Any, int] = {}
        self._alive: list[Any] = []  # ids stay valid while their objects live
        self._budget = _MAX_OBJECTS
        self._modules = {id(module) for _, top in context.reachable.modules.values() for module in top.modules()}
        self._snapshotted = {id(snapshot.container) for snapshot in context.reachable.snapshots}

    def arguments(self) -> Iterator[Line]:
        """The signature of the call."""
        context = self._context
        yield "the structure of the arguments", str(context.spec)
        aliases = iter(first_aliases(context.leaves, context.is_data))
        for number, (leaf, is_data) in enumerate(zip(context.leaves, context.is_data, strict=True)):
            text = (
                f"{_tensor(leaf, context.moving.get(id(leaf), ()))}, the same as {next(aliases)}"
                if is_data
                else self.described(f"argument {number}", leaf)
            )
            yield f"argument {number}", text

    def state(self) -> Iterator[Line]:
        """Every tensor that outlives the call."""
        state = self._context.state
        for slot in state.slots:
            text = f"{_tensor(slot.tensor)}, {self._number(slot.tensor)}"
            yield slot.name, f"{slot.kind.value} {text}, {'no memory' if num_bytes(slot.tensor) == 0 else 'memory'}"
        tensors = [*(slot.tensor for slot in state.slots), *self._context.user]
        yield "memory that two tensors share", str(overlaps(tensors))
        for slot in state.params:
            held = (slot.tensor._backward_hooks, slot.tensor._post_accumulate_grad_hooks)
            if any(held):
                yield f"hooks of {slot.name}", self.described(slot.name, [list((one or {}).values()) for one in held])

    def optimizers(self) -> Iterator[Line]:
        """Optimizers without their state, and the numbers that the graph reads at every call."""
        for name, opt in self._context.state.optimizers:
            yield f"the kind of {name}", self.described(name, opt)
            for key, item in vars(opt).items():
                if key not in _OPTIMIZER_ATTRIBUTES:
                    yield f"{name}.{key}", self.described(f"{name}.{key}", item)
            for key, item in opt.defaults.items():
                if not (_is_number(item) and all(key in group for group in opt.param_groups)):
                    yield f"{name}.defaults.{key}", self.described(f"{name}.defaults.{key}", item)
            yield f"the groups of {name}", str([[self._number(p) for p in g["params"]] for g in opt.param_groups])
            for owner, held in opt.state.items():
                is_param = isinstance(owner, torch.Tensor)
                plain = {k: v for k, v in held.items() if not isinstance(v, torch.Tensor)} if is_param else held
                if not isinstance(plain, torch.Tensor) and plain != {}:
                    where = f"{name}.state[{self._number(owner) if is_param else owner!r}]"
                    yield where, self.described(where, plain)
            hooks = (opt._optimizer_step_pre_hooks, opt._optimizer_step_post_hooks)
            yield f"hooks of {name}", self.described(name, [list(one.values()) for one in hooks])
        yield "numbers of parameter groups", str([hyper.name for hyper in self._context.lifter.hypers])

    def snapshot(self, snapshot: Snapshot) -> Iterator[Line]:
        """The contents of a container."""
        held = snapshot.now()
        if isinstance(held, list):
            yield snapshot.path, self.described(snapshot.path, held)
            return
        if belong_to_library(snapshot.container):  # what else it has may be of this process: `os.environ`, caches
            for key, item in held.items():
                if (told := named_in_library(item)) is not None:
                    yield f"{snapshot.path}.{key}", told
                elif isinstance(item, SCALARS) or is_users(item):
                    yield f"{snapshot.path}.{key}", self.described(snapshot.path, item)
            return
        is_class = isinstance(snapshot.container, ClassView)
        has_hooks = snapshot.path.rpartition(".")[2] in _HOOK_TABLES
        for key, item in held.items():
            if is_bookkeeping(key):
                continue
            if isinstance(key, str) and (told := key_text(key)) is not None:
                yield f"{told} of {snapshot.path}", self.described(snapshot.path, list(item.values()))
            elif is_class and (functions := functions_in(item)):
                yield f"{snapshot.path}.{key}", f"{type(item).__name__} {', '.join(map(_method, functions))}"
            elif not (key in _MODULE_ATTRIBUTES and isinstance(item, (dict, set, bool, type(None)))):
                told_key = self._hook(key) if has_hooks else self.described(snapshot.path, key)
                where = f"{snapshot.path}.{key}" if isinstance(key, str) else f"{snapshot.path}[{told_key}]"
                yield where, self.described(where, item)

    def _hook(self, key: Any) -> str:
        """A name for the number of a hook, which counts all hooks of the process."""
        return f"hook {self._hooks.setdefault(key, len(self._hooks))}"

    def described(self, where: str, thing: Any) -> str:
        """One object as text. Raises NotComparable, which names it."""
        try:
            return self.text_of(thing)
        except NotComparable as error:
            raise NotComparable(f"{where} holds {error}") from None
        except RecursionError:
            raise NotComparable(f"{where} holds objects in objects, too deep to compare") from None

    def _number(self, thing: Any) -> str:
        if id(thing) not in self._numbers:
            self._numbers[id(thing)] = len(self._numbers)
            self._alive.append(thing)
        return f"#{self._numbers[id(thing)]}"

    def text_of(self, thing: Any) -> str:
        self._budget -= 1
        if self._budget < 0:
            raise NotComparable(f"more than {_MAX_OBJECTS} things to compare")
        kind = type(thing)
        name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
        if (text := state_text(thing)) is not None:
            return text
        if isinstance(thing, enum.Enum):
            return f"{name} {thing.name}"
        if isinstance(thing, _VALUES):
            return shortened(f"{name} {thing!r}" if kind is not type(None) else "None")
        if isinstance(thing, type):
            return f"class {thing.__module__}.{thing.__qualname__}"
        if isinstance(thing, types.ModuleType):
            return f"module {thing.__name__}"
        if isinstance(thing, _BUILT_IN):
            return self._built_in(thing)
        seen = id(thing) in self._numbers
        number = self._number(thing)
        return number if seen else f"{number} {name} {self._content(thing)}"

    def _content(self, thing: Any) -> str:
        """The text of an object that has come up for the first time."""
        if isinstance(thing, torch.Tensor):
            return _tensor(thing)
        if isinstance(thing, np.ndarray):
            return _array(thing)
        if isinstance(thing, BUFFERS):
            return hashlib.sha256(bytes(thing)).hexdigest()
        if isinstance(thing, (types.FunctionType, types.MethodType, functools.partial)):
            return self._function(thing)
        if isinstance(thing, (staticmethod, classmethod)):
            return self.text_of(thing.__func__)
        if _is_compiled_step(thing):  # a global of the name that a method has, too: ``step`` beside ``opt.step()``
            return self.text_of(thing.__wrapped__)
        if isinstance(thing, (property, functools.cached_property)):
            parts = (thing.fget, thing.fset, thing.fdel) if isinstance(thing, property) else (thing.func,)
            return self._sequence(parts)
        if isinstance(thing, (list, tuple, deque)):
            return self._sequence(thing)
        if isinstance(thing, (set, frozenset)):
            return shortened(str(sorted(self.text_of(one) for one in list(thing))))
        if isinstance(thing, Mapping):
            return shortened(
                f"{{{', '.join(f'{self.text_of(k)}: {self.text_of(v)}' for k, v in list(thing.items()))}}}"
            )
        if isinstance(thing, nn.Module):
            if id(thing) not in self._modules and id(thing) not in self._context.reachable.wrappers:
                raise NotComparable(f"a module {type(thing).__name__} that the walk did not reach")
            return ""
        if isinstance(thing, Optimizer):
            if id(thing) not in self._context.reachable.optimizers:
                raise NotComparable(f"an optimizer {type(thing).__name__} that the walk did not reach")
            return ""
        if isinstance(thing, torch.Generator):
            return str(thing.device)
        if isinstance(thing, DeviceMesh):
            return str(thing)
        if isinstance(thing, torch.distributed.ProcessGroup):
            return str(torch.distributed.get_process_group_ranks(thing))
        if isinstance(thing, weakref.ReferenceType):
            return self.text_of(thing())
        return "" if isinstance(thing, (*_IGNORED, *_SCHEDULERS)) else self._object(thing)

    def _object(self, thing: Any) -> str:
        kind = type(thing)
        attributes = getattr(thing, "__dict__", None)
        held = {name: getattr(thing, name) for name in slots(kind) if hasattr(thing, name)}
        if attributes is None and not held and kind is not object and "__slots__" not in vars(kind):
            raise NotComparable(f"a {kind.__qualname__}, of which nothing can be seen")
        if attributes is not None and id(attributes) in self._snapshotted and is_user_class(kind):
            attributes = {}  # described by a snapshot of its own
        # By name: a library that goes through a set to set them does so in another order in every process.
        described = sorted((attributes or {}).items(), key=lambda item: str(item[0]))
        return self._sequence([*(item for item in described if not _is_cached_hash(*item)), *held.items()])

    def _sequence(self, things: Iterable[Any]) -> str:
        return shortened(f"({', '.join(self.text_of(one) for one in list(things))})")

    def _function(self, thing: Any) -> str:
        if isinstance(thing, functools.partial):
            return self._sequence((thing.func, thing.args, thing.keywords))
        if isinstance(thing, types.MethodType):
            return self._sequence((thing.__self__, thing.__func__))
        cells = [cell.cell_contents for cell in thing.__closure__ or () if _has_content(cell)]
        parts = (thing.__defaults__, thing.__kwdefaults__, *cells)
        described = f"{thing.__module__}.{thing.__qualname__}"
        return f"{described} {digest_of_code(thing.__code__)} {'' if _is_of_torch(thing) else self._sequence(parts)}"

    def _built_in(self, thing: Any) -> str:
        owner = getattr(thing, "__self__", None)
        owned = owner is not None and not isinstance(owner, (types.ModuleType, type))
        text = f"built-in {getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', thing)}"
        return f"{text} of {self.text_of(owner)}" if owned else text


def _is_compiled_step(thing: Any) -> bool:
    """Whether an object is one of wholestep's own callables around a function of the user's."""
    return type(thing).__module__.partition(".")[0] == "wholestep" and hasattr(thing, "__wrapped__")


def _is_cached_hash(name: Any, value: Any) -> bool:
    """Whether a private attribute holds what ``hash`` gave of the object: another number in every process."""
    return isinstance(value, int) and str(name).startswith("_") and str(name).endswith("_hash")


def _is_number(thing: Any) -> bool:
    """Whether a default of an optimizer is a number that is read from its groups at every call."""
    return isinstance(thing, float) or (isinstance(thing, tuple) and all(isinstance(one, float) for one in thing))


def _is_of_torch(function: types.FunctionType) -> bool:
    """Whether a function is torch's own. One that `functools.wraps` has given its name is not."""
    named = (function.__module__ or "").partition(".")[0] in ("torch", "wholestep")
    return named and owner_of_function(function) in (Owner.TORCH, Owner.OURS)


def _has_content(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _method(function: Any) -> str:
    """A method in a class. What it reads has snapshots of its own where the step can reach it."""
    inner = inspect.unwrap(function)
    codes = [one.__code__ for one in (function, inner) if isinstance(one, types.FunctionType)]
    defaults = (*(getattr(inner, "__defaults__", None) or ()), *(getattr(inner, "__kwdefaults__", None) or {}).values())
    seen = [one for one in defaults if isinstance(one, _VALUES)]
    name = f"{getattr(inner, '__module__', '')}.{getattr(inner, '__qualname__', '')}"
    return shortened(f"{name} {' '.join(map(digest_of_code, codes))} {seen!r}")


def _tensor(tensor: torch.Tensor, moving: Collection[int] = ()) -> str:
    """A tensor without its numbers. Sizes of dims that move are -1; its strides are compared with theirs by guards."""
    return layout_text(any_size(describe(tensor), moving), has_any_strides=bool(moving))


def layout_text(description: tuple[Any, ...], *, has_any_strides: bool = False) -> str:
    """What `describe` gives of a tensor, as text."""
    kind, dtype, shape, stride, *rest = description
    rest = rest[:7]  # without the address of a part
    strides = "any" if has_any_strides else list(stride)
    return f"{kind.__module__}.{kind.__qualname__} {dtype} {list(shape)} {strides} {' '.join(map(str, rest))}"


def _array(array: np.ndarray[Any, Any]) -> str:
    if array.dtype.hasobject:
        raise NotComparable("an array of Python objects")
    content = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    return f"{array.dtype} {array.shape} {content}"
