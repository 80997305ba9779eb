"""When a captured graph may be used again: the signature of a call, and the sentence that says what changed.

[Note: cheap and complete]
Every call checks everything a trace depends on. Comparing each of thousands of values would cost more than
many a small step, so a quick test stands before each full comparison. It may say "perhaps" too often, never
"the same" wrongly; a full comparison decides. The quick tests:
- a dict that was not written since the last check has the same version number; a dict that was empty is empty;
- a list, a closure cell or an attribute holds the very objects it held;
- hooks of tensors are added through handles, which are numbered;
- one native call compares type, dtype, device, shape, strides and ``requires_grad`` of many tensors.
What lives in a tensor itself (``.data =``, ``resize_``, ``requires_grad_``, ``.grad =``) leaves no trace in any dict,
so every tensor of the state is looked at in every call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
import torch.fx as fx
from torch.nn.modules import module as module_hooks
from torch.utils.hooks import RemovableHandle

from wholestep.capture import tree
from wholestep.capture.quick import VERSIONED, TensorCheck, dict_version
from wholestep.capture.state import Slot, State
from wholestep.capture.walk import CellView, Watch, same
from wholestep.program.program import InputKind

_grad = attrgetter("grad")
_NO_GRADS = {None}


_GLOBAL_HOOKS = tuple(
    hooks for name, hooks in vars(module_hooks).items() if name.startswith("_global_") and "hooks" in name
)


def modes() -> tuple[tuple[str, Any], ...]:
    """Global switches of torch that change what a trace means."""
    return (
        ("grad mode", torch.is_grad_enabled()),
        ("inference mode", torch.is_inference_mode_enabled()),
        ("autocast on CPU", torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")),
        ("autocast on CUDA", torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")),
        ("deterministic algorithms", torch.are_deterministic_algorithms_enabled()),
        ("default dtype", torch.get_default_dtype()),
        ("default device", torch.get_default_device()),
        ("float32 matmul precision", torch.get_float32_matmul_precision()),
        ("number of global module hooks", sum(map(len, _GLOBAL_HOOKS))),
    )


def describe(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What of a tensor a trace depends on: type, dtype, shape, strides, device, ``requires_grad``."""
    return (type(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device, tensor.requires_grad)


def aliases_of(leaves: list[Any], is_data: list[bool]) -> list[int]:
    """Per leaf that is data, the number of the first leaf that is the very same tensor."""
    first: dict[int, int] = {}
    return [first.setdefault(id(leaf), number) for number, leaf in enumerate(leaves) if is_data[number]]


def _spell(description: tuple[Any, ...]) -> str:
    kind, dtype, shape, stride, device, grad = description
    text = f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}"
    return f"{text}, strides {list(stride)}, {kind.__name__}{', requires_grad' if grad else ''}"


def differ(what: str, then: tuple[Any, ...], now: tuple[Any, ...]) -> str:
    """The sentence for two tensors that differ in what a trace depends on; shortest where only the shape does."""
    if then[1:3] != now[1:3]:
        short = [f"{str(d[1]).removeprefix('torch.')}{list(d[2])}" for d in (then, now)]
        return f"{what} was {short[0]}, is {short[1]}"
    return f"{what} was {_spell(then)}, is {_spell(now)}"


@dataclass
class Guards:
    """The signature of one trace. `why_not` is None exactly when the graph means the same for this call."""

    state: list[Slot]
    """Tensors whose description matters."""
    leaves: list[Any]
    """Per argument leaf: the description of a tensor that is data, or the thing itself."""
    is_data: list[bool]
    spec: tree.TreeSpec
    aliases: list[int]
    """Per leaf that is data: the first leaf that is the same tensor. See `aliases_of`."""
    watches: list[Watch]
    grads: dict[int, bool]
    """id of a parameter whose gradient at entry matters -> whether it had one."""
    predicates: tuple[Any, list[Any], list[bool], list[str]] | None
    """Function of host values, their sources, truths while tracing, user's lines."""
    modes: tuple[tuple[str, Any], ...] = field(default_factory=modes)

    def __post_init__(self) -> None:
        self._take_tensors()
        self._take_arguments()
        self._take_python()
        self._remember(self._dict_versions())

    def _take_tensors(self) -> None:
        params = [slot for slot in self.state if slot.kind is InputKind.PARAM]
        others = [slot for slot in self.state if slot.kind is not InputKind.PARAM]
        self.state = [*params, *others]
        self._descriptions = [describe(slot.tensor) for slot in self.state]
        self._state_ids = frozenset(id(slot.tensor) for slot in self.state)
        # Parameters first and apart: what the check brings into the cache serves the look at the gradients.
        self._param_slots = params
        self._params = tuple(slot.tensor for slot in params)
        self._others = tuple(slot.tensor for slot in others)
        self._check_params, self._check_others = TensorCheck(self._params), TensorCheck(self._others)
        self._without_grad = [p for p in self._params if self.grads.get(id(p)) is False]
        self._with_grad = [p for p in self._params if self.grads.get(id(p)) is True]
        self._entry_kinds = [_kind(p.grad) for p in self._with_grad if p.grad is not None]

    def _take_arguments(self) -> None:
        self._data = [number for number, data in enumerate(self.is_data) if data]
        self._things = [number for number, data in enumerate(self.is_data) if not data]

    def _take_python(self) -> None:
        self.watches = [watch for watch in self.watches if watch.guard]
        self._lists = [(w.container, w.held, w) for w in self.watches if isinstance(w.container, list)]
        self._cells = [w for w in self.watches if isinstance(w.container, CellView)]
        dicts = [w for w in self.watches if isinstance(w.container, dict) and not isinstance(w.container, CellView)]
        self._opaque = [w for w in dicts if type(w.container) not in VERSIONED]
        dicts = [w for w in dicts if type(w.container) in VERSIONED]
        self._empty = [w for w in dicts if not w.container and w.keys is None]
        self._filled = [w for w in dicts if w.container or w.keys is not None]
        self._containers = [w.container for w in self._filled]
        self._nothing = [w.container for w in self._empty]
        self._hooks = [_hooks_of(p) for p in self._params]
        self._has_hooks = any(self._hooks)

    def _dict_versions(self) -> list[int]:
        return list(map(dict_version, self._containers))

    def _remember(self, versions: list[int]) -> None:
        self._versions = versions
        self._hook_count = RemovableHandle.next_id

    def why_not(self, leaves: list[Any], spec: tree.TreeSpec) -> str | None:
        """Why this trace does not hold for a call with these arguments, in one sentence; None if it holds."""
        return self._arguments(leaves, spec) or self._python() or self._tensors() or self._branches()

    def _arguments(self, leaves: list[Any], spec: tree.TreeSpec) -> str | None:
        if spec is not self.spec and spec != self.spec:
            return f"the structure of the arguments was {self.spec}, is {spec}"
        held = self.leaves
        for number in self._things:
            then, now = held[number], leaves[number]
            if then is not now and not same(then, now):
                return f"argument {number} was {_short(then)}, is {_short(now)}"
        for number in self._data:
            then, now = held[number], leaves[number]
            if not isinstance(now, torch.Tensor):
                return f"argument {number} was a tensor, is {type(now).__name__}"
            if (found := describe(now)) != then:
                return differ(f"argument {number}", then, found)
            if id(now) in self._state_ids:
                return f"argument {number} was data of the call, is a tensor of the model, the optimizer or a closure"
        return self._repeats(leaves)

    def _repeats(self, leaves: list[Any]) -> str | None:
        """The same tensor given twice is one input of the graph, so it must be given twice again, and no other."""
        if len(self._data) < 2:
            return None
        for number, then, now in zip(self._data, self.aliases, aliases_of(leaves, self.is_data), strict=True):
            if then != now:
                was, is_now = (_alias(number, one) for one in (then, now))
                return f"argument {number} was {was}, is {is_now}"
        return None

    def _python(self) -> str | None:
        if self.modes != (now := modes()):
            return "; ".join(f"{a[0]} was {a[1]}, is {b[1]}" for a, b in zip(self.modes, now, strict=True) if a != b)
        slow = [w for live, held, w in self._lists if len(live) != len(held) or not all(map(is_, live, held))]
        slow += [w for w in self._cells if _cell_moved(w)]
        slow += self._opaque
        versions = self._dict_versions()
        if versions != self._versions:
            slow += [w for w, a, b in zip(self._filled, versions, self._versions, strict=True) if a != b]
        if any(self._nothing):
            slow += self._empty
        for watch in slow:
            for path, then, new in watch.changes():
                return f"{path} was {_short(then)}, is {_short(new)}"
        if self._hook_count != RemovableHandle.next_id or self._has_hooks:
            for slot, then in zip(self._param_slots, self._hooks, strict=True):
                if not _same_hooks(_hooks_of(slot.tensor), then):
                    return f"a hook of {slot.name} was added or removed"
        self._remember(versions)
        return None

    def _tensors(self) -> str | None:
        params, gradients = self._check_params.holds(self._params), self._gradients()
        if params and self._check_others.holds(self._others):
            return gradients
        for slot, then in zip(self.state, self._descriptions, strict=True):
            if (found := describe(slot.tensor)) != then:
                return differ(slot.name, then, found)
        self._check_params.renew(self._params)
        self._check_others.renew(self._others)
        return gradients

    def _gradients(self) -> str | None:
        """Whether each parameter has a gradient at entry where it had one. By identity: a gradient may be zero."""
        appeared = self._without_grad and set(map(_grad, self._without_grad)) != _NO_GRADS
        if appeared or any(map(is_, map(_grad, self._with_grad), repeat(None))):
            for slot in self._param_slots:
                before, now = self.grads.get(id(slot.tensor)), slot.tensor.grad is not None
                if before is not None and before != now:
                    was, is_now = ("a", "none") if before else ("no", "one")
                    return f"{slot.name} had {was} gradient at entry, now it has {is_now}"
        for param, then in zip(self._with_grad, self._entry_kinds, strict=True):
            if (found := _kind(param.grad)) != then:
                name = next(slot.name for slot in self._param_slots if slot.tensor is param)
                return f"the gradient of {name} at entry was {_spell_kind(then)}, is {_spell_kind(found)}"
        return None

    def _branches(self) -> str | None:
        if self.predicates is None:
            return None
        function, sources, truths, lines = self.predicates
        with torch.no_grad():
            found = function(*(source() for source in sources))
        for then, now, line in zip(truths, found, lines, strict=True):
            if then != now:
                return f"the condition at {line} was {then}, is {now}"
        return None


def _kind(grad: torch.Tensor | None) -> tuple[Any, ...]:
    """What of a gradient at entry a trace depends on. Its shape is that of the parameter."""
    return (type(grad), grad.dtype, grad.layout, grad.device) if grad is not None else ()


def _spell_kind(kind: tuple[Any, ...]) -> str:
    return ", ".join(one.__name__ if isinstance(one, type) else str(one).removeprefix("torch.") for one in kind)


def _cell_moved(watch: Watch) -> bool:
    """Whether a closure cell may hold something else."""
    try:
        return any(watch.container[key] is not watch.held[key] for key in watch.keys or ())
    except (KeyError, ValueError):  # an empty cell
        return True


def _alias(number: int, first: int) -> str:
    return "a tensor of its own" if first == number else f"the same tensor as argument {first}"


def _same_hooks(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


def _hooks_of(param: torch.Tensor) -> tuple[Any, ...]:
    later = param._post_accumulate_grad_hooks
    return (*(param._backward_hooks or {}).values(), *(later or {}).values())


def _short(thing: Any) -> str:
    if isinstance(thing, torch.Tensor):
        return f"a tensor {list(thing.shape)} at {id(thing):#x}"
    text = repr(thing)
    return text if len(text) < 60 and "\n" not in text else f"a {type(thing).__name__} at {id(thing):#x}"


def host_sources(predicates: tuple[fx.GraphModule, list[bool], list[str]], slots: dict[str, Any]) -> Any:
    """Readies the predicate graph for calls: sources read hyper-parameters as 0-d tensors and clone state."""
    module, truths, lines = predicates
    sources = [slots[node.name] for node in module.graph.find_nodes(op="placeholder")]
    return module.forward, sources, truths, lines


def state_slots(state: State, used: set[int]) -> list[Slot]:
    """The slots whose description a trace depends on: every parameter, and what the graph reads."""
    read = (slot for number, slot in enumerate(state.slots) if number in used or slot.kind is InputKind.PARAM)
    return [slot for slot in read if slot.kind is not InputKind.GRAD]
