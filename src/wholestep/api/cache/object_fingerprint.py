"""A portrait of a scene: everything a trace depends on as lines of text that another process can compare.

[Note: portraits]
Guards compare live objects with those of the trace, most of them by identity, which means nothing in another process.
There a portrait stands in for it: a scalar is its value, a function its code, a container its contents, a tensor its
layout, and what comes up again is the number of its first appearance, so that two things which were one are one again.
What cannot be told from outside is refused, never guessed: a step that reaches such a thing is captured in every
process.
Like guards, a portrait shows of the user's own objects those attributes that the step's code names; of objects whose
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
from collections.abc import Iterable, Iterator, Mapping
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

from wholestep.capture.functionalize.alias_checks import overlaps
from wholestep.capture.functionalize.storage_resize import num_bytes
from wholestep.capture.guards import guards as guarding
from wholestep.capture.python.class_attributes import functions_in
from wholestep.capture.python.code_owner import is_user_class
from wholestep.capture.python.container_views import BUFFERS, ClassView, ContentView, SlotsView, slots
from wholestep.capture.python.snapshot import Snapshot
from wholestep.capture.reach.step_context import StepContext
from wholestep.capture.scalars.rank_symbols import ranks

Line = tuple[str, str]
"""What it is, and how it is."""

_LONGEST = 200  # characters of a text that are kept as they are
_MOST = 200_000  # things in one portrait

_VALUES = (
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
    range, slice, re.Pattern, pathlib.PurePath, Fraction, Decimal, date, time, timedelta, np.generic, np.dtype,
)  # fmt: skip
"""Things that their ``repr`` tells apart."""
_TOOLS = (
    logging.Logger, logging.Handler, io.IOBase, type(threading.Lock()), type(threading.RLock()), threading.Thread,
    threading.Event, threading.Condition, torch.utils.data.DataLoader, torch.utils.data.Dataset,
)  # fmt: skip
"""Things that no arithmetic of a step depends on, or that the walk does not look into either."""
_DESCRIBED = (LRScheduler, ReduceLROnPlateau)
_BUILT_IN = (
    types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType, types.GetSetDescriptorType,
    types.MemberDescriptorType, types.ClassMethodDescriptorType, types.MethodWrapperType,
    torch._ops.OpOverload, torch._ops.OpOverloadPacket,
)  # fmt: skip
_OWN_OF_MODULES = frozenset(nn.Module().__dict__) - {"training"}
"""Containers that are watched one by one."""

_OF_OPTIMIZERS = frozenset({
    "state", "param_groups", "defaults", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_opt_called",
    "_step_count",
})  # fmt: skip
"""Attributes of optimizers that are looked at otherwise, or that they and schedulers count in for their warnings."""


class NotComparable(Exception):
    """Something a step can reach of which another process could not tell whether it is the same. Says what."""


def object_fingerprint(context: StepContext, options: Mapping[str, Any]) -> list[Line]:
    """Everything a trace of this scene depends on, in an order that is the same in every process.

    `options` are things besides, by name, of which the same is asked. Raises NotComparable.
    """
    painter = _Painter(context)
    lines = [(f"the mode {name}", str(value)) for name, value in guarding.modes()]
    lines += [(f"the group {one.axis.name}", f"{one.axis}, rank {'any' if one.axis.ranks is None else one.number}")
              for one in ranks()]  # fmt: skip
    lines += painter.arguments()
    lines += [(f"the code of {code.co_qualname}", digest_of_code(code)) for code in context.found.codes]
    lines += painter.optimizers()
    for group in context.lifter.snapshots:
        lines += painter.watch(group)
    lines += painter.state()
    for watch in context.found.snapshots:
        painted = isinstance(watch.container, (ContentView, SlotsView))  # where the thing itself comes up
        if not painted and watch.guard:
            lines += painter.watch(watch)
    return [*lines, *((name, painter.named(name, thing)) for name, thing in options.items())]


class _Painter:
    """Writes things down, each once."""

    def __init__(self, context: StepContext) -> None:
        self._scene = context
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []  # ids stay valid while their objects live
        self._left = _MOST
        self._modules = {id(module) for _, top in context.found.modules.values() for module in top.modules()}
        self._watched = {id(watch.container) for watch in context.found.snapshots}

    def arguments(self) -> Iterator[Line]:
        """The signature of the call."""
        context = self._scene
        yield "the structure of the arguments", str(context.spec)
        aliases = iter(guarding.aliases_of(context.leaves, context.is_data))
        for number, (leaf, is_data) in enumerate(zip(context.leaves, context.is_data, strict=True)):
            text = (
                f"{_tensor(leaf)}, the same as {next(aliases)}" if is_data else self.named(f"argument {number}", leaf)
            )
            yield f"argument {number}", text

    def state(self) -> Iterator[Line]:
        """Every tensor that outlives the call."""
        state = self._scene.state
        for slot in state.slots:
            text = f"{_tensor(slot.tensor)}, {self._number(slot.tensor)}"
            yield slot.name, f"{slot.kind.value} {text}, {'no memory' if num_bytes(slot.tensor) == 0 else 'memory'}"
        tensors = [*(slot.tensor for slot in state.slots), *self._scene.user]
        yield "memory that two tensors share", str(overlaps(tensors))
        for slot in state.params:
            held = (slot.tensor._backward_hooks, slot.tensor._post_accumulate_grad_hooks)
            if any(held):
                yield f"hooks of {slot.name}", self.named(slot.name, [list((one or {}).values()) for one in held])

    def optimizers(self) -> Iterator[Line]:
        """Optimizers without their state, and the numbers that the graph reads at every call."""
        for name, opt in self._scene.state.optimizers:
            yield f"the kind of {name}", self.named(name, opt)
            for key, item in vars(opt).items():
                if key not in _OF_OPTIMIZERS:
                    yield f"{name}.{key}", self.named(f"{name}.{key}", item)
            for key, item in opt.defaults.items():
                if not _is_number(item):
                    yield f"{name}.defaults.{key}", self.named(f"{name}.defaults.{key}", item)
            yield f"the groups of {name}", str([[self._number(p) for p in g["params"]] for g in opt.param_groups])
            for owner, held in opt.state.items():
                is_param = isinstance(owner, torch.Tensor)
                plain = {k: v for k, v in held.items() if not isinstance(v, torch.Tensor)} if is_param else held
                if not isinstance(plain, torch.Tensor) and plain != {}:
                    where = f"{name}.state[{self._number(owner) if is_param else owner!r}]"
                    yield where, self.named(where, plain)
            hooks = (opt._optimizer_step_pre_hooks, opt._optimizer_step_post_hooks)
            yield f"hooks of {name}", self.named(name, [list(one.values()) for one in hooks])
        yield "numbers of parameter groups", str([hyper.name for hyper in self._scene.lifter.hypers])

    def watch(self, watch: Snapshot) -> Iterator[Line]:
        """What a watched container holds."""
        held = watch.now()
        if isinstance(held, list):
            yield watch.path, self.named(watch.path, held)
            return
        of_class = isinstance(watch.container, ClassView)
        for key, item in held.items():
            if of_class and (functions := functions_in(item)):
                yield f"{watch.path}.{key}", f"{type(item).__name__} {', '.join(map(_method, functions))}"
            elif not (key in _OWN_OF_MODULES and isinstance(item, (dict, set, bool, type(None)))):
                where = (
                    f"{watch.path}.{key}" if isinstance(key, str) else f"{watch.path}[{self.named(watch.path, key)}]"
                )
                yield where, self.named(where, item)

    def named(self, where: str, thing: Any) -> str:
        """One thing as text. Raises NotComparable, which names it."""
        try:
            return self.paint(thing)
        except NotComparable as error:
            raise NotComparable(f"{where} holds {error}") from None
        except RecursionError:
            raise NotComparable(f"{where} holds objects in objects, too deep to compare") from None

    def _number(self, thing: Any) -> str:
        if id(thing) not in self._numbers:
            self._numbers[id(thing)] = len(self._numbers)
            self._kept.append(thing)
        return f"#{self._numbers[id(thing)]}"

    def paint(self, thing: Any) -> str:
        self._left -= 1
        if self._left < 0:
            raise NotComparable(f"more than {_MOST} things to compare")
        kind = type(thing)
        name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
        if isinstance(thing, enum.Enum):
            return f"{name} {thing.name}"
        if isinstance(thing, _VALUES):
            return _clipped(f"{name} {thing!r}" if kind is not type(None) else "None")
        if isinstance(thing, type):
            return f"class {thing.__module__}.{thing.__qualname__}"
        if isinstance(thing, types.ModuleType):
            return f"module {thing.__name__}"
        if isinstance(thing, _BUILT_IN):
            return self._built_in(thing)
        known = id(thing) in self._numbers
        number = self._number(thing)
        return number if known else f"{number} {name} {self._inside(thing)}"

    def _inside(self, thing: Any) -> str:
        """A thing that has come up for the first time."""
        if isinstance(thing, torch.Tensor):
            return _tensor(thing)
        if isinstance(thing, np.ndarray):
            return _array(thing)
        if isinstance(thing, BUFFERS):
            return hashlib.sha256(bytes(thing)).hexdigest()
        if isinstance(thing, (types.FunctionType, types.MethodType, functools.partial)):
            return self._function(thing)
        if isinstance(thing, (staticmethod, classmethod)):
            return self.paint(thing.__func__)
        if _is_compiled_step(thing):  # a global of the name that a method has, too: ``step`` beside ``opt.step()``
            return self.paint(thing.__wrapped__)
        if isinstance(thing, (property, functools.cached_property)):
            parts = (thing.fget, thing.fset, thing.fdel) if isinstance(thing, property) else (thing.func,)
            return self._each(parts)
        if isinstance(thing, (list, tuple, deque)):
            return self._each(thing)
        if isinstance(thing, (set, frozenset)):
            return _clipped(str(sorted(self.paint(one) for one in list(thing))))
        if isinstance(thing, Mapping):
            return _clipped(f"{{{', '.join(f'{self.paint(k)}: {self.paint(v)}' for k, v in list(thing.items()))}}}")
        if isinstance(thing, nn.Module):
            if id(thing) not in self._modules:
                raise NotComparable(f"a module {type(thing).__name__} that the walk did not reach")
            return ""
        if isinstance(thing, Optimizer):
            if id(thing) not in self._scene.found.optimizers:
                raise NotComparable(f"an optimizer {type(thing).__name__} that the walk did not reach")
            return ""
        if isinstance(thing, torch.Generator):
            return str(thing.device)
        if isinstance(thing, DeviceMesh):
            return str(thing)
        if isinstance(thing, torch.distributed.ProcessGroup):
            return str(torch.distributed.get_process_group_ranks(thing))
        if isinstance(thing, weakref.ReferenceType):
            return self.paint(thing())
        return "" if isinstance(thing, (*_TOOLS, *_DESCRIBED)) else self._object(thing)

    def _object(self, thing: Any) -> str:
        kind = type(thing)
        attributes = getattr(thing, "__dict__", None)
        held = {name: getattr(thing, name) for name in slots(kind) if hasattr(thing, name)}
        if attributes is None and not held and kind is not object and "__slots__" not in vars(kind):
            raise NotComparable(f"a {kind.__qualname__}, of which nothing can be seen")
        if attributes is not None and id(attributes) in self._watched and is_user_class(kind):
            attributes = {}  # a watch of its own
        # By name: a library that goes through a set to set them does so in another order in every process.
        named = sorted((attributes or {}).items(), key=lambda item: str(item[0]))
        return self._each([*(item for item in named if not _is_kept_hash(*item)), *held.items()])

    def _each(self, things: Iterable[Any]) -> str:
        return _clipped(f"({', '.join(self.paint(one) for one in list(things))})")

    def _function(self, thing: Any) -> str:
        if isinstance(thing, functools.partial):
            return self._each((thing.func, thing.args, thing.keywords))
        if isinstance(thing, types.MethodType):
            return self._each((thing.__self__, thing.__func__))
        cells = [cell.cell_contents for cell in thing.__closure__ or () if _is_set(cell)]
        parts = (thing.__defaults__, thing.__kwdefaults__, *cells)
        named = f"{thing.__module__}.{thing.__qualname__}"
        return f"{named} {digest_of_code(thing.__code__)} {'' if _is_torchs(thing) else self._each(parts)}"

    def _built_in(self, thing: Any) -> str:
        owner = getattr(thing, "__self__", None)
        owned = owner is not None and not isinstance(owner, (types.ModuleType, type))
        text = f"built-in {getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', thing)}"
        return f"{text} of {self.paint(owner)}" if owned else text


def _is_compiled_step(thing: Any) -> bool:
    """Whether a thing is one of wholestep's own callables around a function of the user's."""
    return type(thing).__module__.partition(".")[0] == "wholestep" and hasattr(thing, "__wrapped__")


def _is_kept_hash(name: Any, value: Any) -> bool:
    """Whether a private attribute holds what ``hash`` gave of the object: another number in every process."""
    return isinstance(value, int) and str(name).startswith("_") and str(name).endswith("_hash")


def _is_number(thing: Any) -> bool:
    """Whether a default of an optimizer is a number that is read from its groups at every call."""
    return isinstance(thing, float) or (isinstance(thing, tuple) and all(isinstance(one, float) for one in thing))


def _is_torchs(function: types.FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] in ("torch", "wholestep")


def _is_set(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _method(function: Any) -> str:
    """A method in a class. What it reads is watched by itself where the step can reach it."""
    inner = inspect.unwrap(function)
    codes = [one.__code__ for one in (function, inner) if isinstance(one, types.FunctionType)]
    defaults = (*(getattr(inner, "__defaults__", None) or ()), *(getattr(inner, "__kwdefaults__", None) or {}).values())
    known = [one for one in defaults if isinstance(one, _VALUES)]
    name = f"{getattr(inner, '__module__', '')}.{getattr(inner, '__qualname__', '')}"
    return _clipped(f"{name} {' '.join(map(digest_of_code, codes))} {known!r}")


def _tensor(tensor: torch.Tensor) -> str:
    kind, dtype, shape, stride, *rest = guarding.describe(tensor)
    return f"{kind.__module__}.{kind.__qualname__} {dtype} {list(shape)} {list(stride)} {' '.join(map(str, rest))}"


def _array(array: np.ndarray[Any, Any]) -> str:
    if array.dtype.hasobject:
        raise NotComparable("an array of Python objects")
    content = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    return f"{array.dtype} {array.shape} {content}"


def _clipped(text: str) -> str:
    """A text, of which what is too long to read is a digest."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST // 2]}... {hashlib.sha256(text.encode(errors='backslashreplace')).hexdigest()}"


@functools.cache
def digest_of_code(code: types.CodeType) -> str:
    """What a code object does, and not where it stands: the same for the same source in every process."""
    made = hashlib.sha256()
    facts = (code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags,
             code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_exceptiontable)  # fmt: skip
    made.update(repr(facts).encode())
    for const in code.co_consts:
        made.update((digest_of_code(const) if isinstance(const, types.CodeType) else _constant(const)).encode())
    return made.hexdigest()[:20]


def _constant(const: Any) -> str:
    if isinstance(const, frozenset):
        return f"frozenset {sorted(map(_constant, const))}"
    if isinstance(const, tuple):
        return f"({', '.join(map(_constant, const))})"
    return f"{type(const).__name__} {const!r}"
