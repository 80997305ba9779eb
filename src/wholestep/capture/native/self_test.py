"""fault(module): tests native guards on things whose changes are known, before they are trusted."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from types import CellType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from wholestep.capture.python.code_names import FUNCTION_PARTS
from wholestep.capture.python.container_views import attribute_dict

STATE, PARAMETER, WITHOUT_GRADIENT, WITH_GRADIENT = range(4)
"""What is compared of a tensor besides its layout: nothing, hooks, hooks and that there is no gradient or one."""

VERSIONED: tuple[type, ...] = (dict, defaultdict, OrderedDict)
"""Kinds of dict of which Python tells every write. A subclass in Python may read from elsewhere."""

Change = Callable[[Any], object]

_DICT_WRITES: dict[str, Change] = {
    "a value replaced": lambda d: d.update(a=2),
    "an item added": lambda d: d.__setitem__("b", 3),
    "an item removed": lambda d: d.pop("a"),
    "cleared": lambda d: d.clear(),
}
_ATTRIBUTE_WRITES: dict[str, Change] = {
    "an attribute replaced": lambda owner: setattr(owner, "a", 2),
    "an attribute added": lambda owner: setattr(owner, "late", 3),
    "an attribute removed": lambda owner: delattr(owner, "a"),
}
_LIST_WRITES: dict[str, Change] = {
    "an item replaced": lambda a: a.__setitem__(0, ...),
    "an item added": lambda a: a.append(1),
    "cleared": lambda a: a.clear(),
}
_TENSOR_CHANGES: dict[str, Change] = {
    "shape": lambda t: setattr(t, "data", torch.zeros(3, 2)),
    "strides": lambda t: setattr(t, "data", torch.zeros(3, 2).t()),
    "dtype": lambda t: setattr(t, "data", torch.zeros(2, 3, dtype=torch.float64)),
    "requires_grad": lambda t: t.requires_grad_(not t.requires_grad),
    "what the object wraps": lambda t: torch.utils.swap_tensors(t, torch.zeros(4)),
}
_PARAMETER_CHANGES: dict[str, Change] = {
    "a gradient": lambda t: setattr(t, "grad", torch.zeros(2, 3)),
    "a hook": lambda t: t.register_hook(lambda grad: None),
    "a hook behind the gradient": lambda t: t.register_post_accumulate_grad_hook(lambda t: None),
}
_HOOK_CHANGES: dict[str, Change] = {
    "a hook beside another": lambda t: t.register_hook(lambda grad: None),
    "a hook removed": lambda t: t._backward_hooks.popitem(),
}


_WRAPPER_CHANGES: dict[str, Change] = {
    "the part": lambda t: setattr(t, "local", torch.zeros(2, 3)),
    "how it is cut": lambda t: setattr(t, "spec", object()),
    "the shape of the part": lambda t: setattr(t.local, "data", torch.zeros(3, 2)),
    "requires_grad": lambda t: t.requires_grad_(not t.requires_grad),
    "a gradient": lambda t: setattr(t, "grad", torch.zeros(4, 3)),
}


class _Wrapper(torch.Tensor):
    """A tensor that stands for what it holds in slots, as a DTensor does."""

    __slots__ = ("local", "spec")
    local: torch.Tensor
    spec: object

    @staticmethod
    def __new__(cls) -> _Wrapper:
        made: _Wrapper = torch.Tensor._make_wrapper_subclass(cls, (4, 3))
        made.local, made.spec = torch.zeros(2, 3), object()
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} of a tensor that stands for another")


_WARM = 100
"""Writes after which Python has put an instruction of its own in the place of the general one."""


_FUNCTION_CHANGES: dict[str, Change] = {
    "code": lambda function: setattr(function, "__code__", (lambda: 1).__code__),
    "defaults": lambda function: setattr(function, "__defaults__", (1,)),
    "keyword defaults": lambda function: setattr(function, "__kwdefaults__", {"a": 1}),
}


class _Thing:
    pass


class _OtherThing:
    pass


_OBJECT_CHANGES: dict[str, Change] = {
    "class": lambda one: setattr(one[0], "__class__", _OtherThing),
    "dict": lambda one: setattr(one[0], "__dict__", {}),
}


class _Owner:
    def __init__(self) -> None:
        self.a = self.b = 1

    def write(self) -> None:
        self.a += 1


def fault(module: ModuleType) -> str:
    """What the library fails to see, or sees without reason; empty if it can be trusted."""
    for kind in VERSIONED:
        for name, change in _DICT_WRITES.items():
            if not _seen(module, change, container=kind({"a": 1}) if kind is not defaultdict else kind(int, a=1)):
                return f"{kind.__name__}: {name}"
    owner = _Owner()
    for _ in range(_WARM):
        owner.write()  # first as an object without a dict of its own
    if not all(_seen(module, lambda attributes: owner.write(), container=vars(owner)) for _ in range(_WARM)):
        return "dict: an attribute written"
    for name, write in _ATTRIBUTE_WRITES.items():
        kind, one = type("Kind", (), {"a": 1}), _Owner()
        for what, thing, attributes in (("class", kind, attribute_dict(kind)), ("dict", one, vars(one))):
            if not _seen(module, lambda _, write=write, thing=thing: write(thing), container=attributes):  # type: ignore[misc]
                return f"{what}: {name}"
    for name, change in _LIST_WRITES.items():
        if not _seen(module, change, container=[1, 2]):
            return f"list: {name}"
    if not _seen(module, lambda cell: setattr(cell, "cell_contents", 2), container=CellType(1)):
        return "closure cell"
    for name, change in _FUNCTION_CHANGES.items():
        if not _seen(module, change, container=FunctionType((lambda: None).__code__, {})):
            return f"function: {name}"
    for name, change in _OBJECT_CHANGES.items():
        if not _seen(module, change, container=(_Thing(),)):
            return f"object: {name}"
    for name, change in _TENSOR_CHANGES.items():
        if not _seen(module, change, tensor=torch.zeros(2, 3)):
            return f"tensor: {name}"
    for name, change in (_TENSOR_CHANGES | _PARAMETER_CHANGES).items():
        if not _seen(module, change, tensor=nn.Parameter(torch.zeros(2, 3)), want=WITHOUT_GRADIENT):
            return f"parameter: {name}"
    for name, change in _WRAPPER_CHANGES.items():
        if not _seen(module, change, tensor=_Wrapper(), want=WITHOUT_GRADIENT):
            return f"sharded parameter: {name}"
    for name, change in _HOOK_CHANGES.items():
        parameter = nn.Parameter(torch.zeros(2, 3))
        parameter.register_hook(lambda grad: None)
        if not _seen(module, change, tensor=parameter, want=PARAMETER):
            return f"parameter: {name}"
    parameter = nn.Parameter(torch.zeros(2, 3))
    parameter.grad = torch.zeros(2, 3)
    if not _seen(module, lambda t: setattr(t, "grad", None), tensor=parameter, want=WITH_GRADIENT):
        return "parameter: no gradient"
    return ""


def _seen(module: ModuleType, change: Change, *, container: Any = None, tensor: Any = None, want: int = STATE) -> bool:
    """Whether nothing is reported before the change, and the change is."""
    things: tuple[Any, ...] = () if container is None else (container,)
    held = tuple(_held(one) for one in things)
    tensors: tuple[Any, ...] = () if tensor is None else (tensor,)
    slots = (_Wrapper.local, _Wrapper.spec)
    guard = module.StateGuard(tensors, bytes([want] * len(tensors)), things, held, slots)
    quiet = not _changed(module, guard) and not _changed(module, guard)
    change(container if tensor is None else tensor)
    return quiet and _changed(module, guard) == ([0] if things else [module.TENSORS])


def _held(container: Any) -> Any:
    """What a guard is told that a container held."""
    if isinstance(container, FunctionType):
        return tuple(getattr(container, part) for part in FUNCTION_PARTS)
    if isinstance(container, tuple):
        return type(container[0]), vars(container[0])
    return tuple(container) if isinstance(container, list) else getattr(container, "cell_contents", None)


def _changed(module: ModuleType, guard: Any) -> list[int]:
    """What a guard names besides modes: the test may run where a mode of somebody is on, which always counts."""
    return [number for number in guard.changed() if number != module.MODES]
