"""When a captured graph may be used again: the signature of a call, and the sentence that says what changed.

[Note: cheap and complete]
Every call checks everything a trace depends on. Comparing each of thousands of values would cost more than
many a small step, so three facts are used first: a dict that was not written since the last check has the
same version number; hooks can only be added through handles, which are numbered; and one native call
compares type, dtype, device, shape and ``requires_grad`` of many tensors. What a quick test cannot vouch for is
compared in full, and only a full comparison decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
import torch.fx as fx
from torch.utils.hooks import RemovableHandle

from wholestep.capture import tree
from wholestep.capture.quick import TensorCheck, dict_version
from wholestep.capture.state import Slot, State
from wholestep.capture.walk import CellView, Watch, same
from wholestep.program.program import InputKind

_grad = attrgetter("grad")


def modes() -> tuple[tuple[str, Any], ...]:
    """Global switches of torch that change what a trace means."""
    return (
        ("grad mode", torch.is_grad_enabled()),
        ("inference mode", torch.is_inference_mode_enabled()),
        ("autocast on CPU", torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")),
        ("autocast on CUDA", torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")),
        ("deterministic algorithms", torch.are_deterministic_algorithms_enabled()),
        ("default dtype", torch.get_default_dtype()),
        ("float32 matmul precision", torch.get_float32_matmul_precision()),
    )


def describe(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What of a tensor a trace depends on: type, dtype, shape, strides, device, ``requires_grad``."""
    return (type(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device, tensor.requires_grad)


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
    watches: list[Watch]
    grads: dict[int, bool]
    """id of a parameter whose gradient at entry matters -> whether it had one."""
    predicates: tuple[Any, list[Any], list[bool], list[str]] | None
    """Function of host values, their sources, truths while tracing, user's lines."""
    modes: tuple[tuple[str, Any], ...] = field(default_factory=modes)
    _descriptions: list[tuple[Any, ...]] = field(default_factory=list)
    _check: TensorCheck | None = None
    _versions: list[int] = field(default_factory=list)
    _hook_count: int = -1
    _hooks: list[tuple[Any, ...]] = field(default_factory=list)
    _params: list[torch.Tensor] = field(default_factory=list)
    _without_grad: list[torch.Tensor] = field(default_factory=list)
    _with_grad: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._descriptions = [describe(slot.tensor) for slot in self.state]
        self._check = TensorCheck([slot.tensor for slot in self.state])
        self.watches = [watch for watch in self.watches if watch.guard]
        self._lists = [w for w in self.watches if isinstance(w.container, list)]
        self._cells = [w for w in self.watches if isinstance(w.container, CellView)]
        dicts = [w for w in self.watches if isinstance(w.container, dict) and not isinstance(w.container, CellView)]
        self._empty = [w for w in dicts if not w.container and w.keys is None]
        self._filled = [w for w in dicts if w.container or w.keys is not None]
        self._containers = [w.container for w in self._filled]
        self._nothing = [w.container for w in self._empty]
        self._params = [slot.tensor for slot in self.state if slot.kind is InputKind.PARAM]
        self._without_grad = [p for p in self._params if self.grads.get(id(p)) is False]
        self._with_grad = [p for p in self._params if self.grads.get(id(p)) is True]
        self._hooks = [_hooks_of(p) for p in self._params]
        self._remember()

    def _remember(self) -> None:
        self._versions = list(map(dict_version, self._containers))
        self._hook_count = RemovableHandle.next_id

    def why_not(self, leaves: list[Any], spec: tree.TreeSpec) -> str | None:
        """Why this trace does not hold for a call with these arguments, in one sentence; None if it holds."""
        return self._arguments(leaves, spec) or self._python() or self._tensors() or self._branches()

    def _arguments(self, leaves: list[Any], spec: tree.TreeSpec) -> str | None:
        if spec != self.spec:
            return f"the structure of the arguments was {self.spec}, is {spec}"
        for number, (then, now, data) in enumerate(zip(self.leaves, leaves, self.is_data, strict=True)):
            if data:
                if not isinstance(now, torch.Tensor):
                    return f"argument {number} was a tensor, is {type(now).__name__}"
                if (found := describe(now)) != then:
                    return differ(f"argument {number}", then, found)
            elif then is not now and not same(then, now):
                return f"argument {number} was {_short(then)}, is {_short(now)}"
        return None

    def _python(self) -> str | None:
        if self.modes != (now := modes()):
            return "; ".join(f"{a[0]} was {a[1]}, is {b[1]}" for a, b in zip(self.modes, now, strict=True) if a != b)
        slow = [*self._lists, *self._cells]
        versions = list(map(dict_version, self._containers))
        if versions != self._versions:
            slow += [w for w, a, b in zip(self._filled, versions, self._versions, strict=True) if a != b or a < 0]
        if any(self._nothing):
            slow += self._empty
        for watch in slow:
            for path, then, new in watch.changes():
                return f"{path} was {_short(then)}, is {_short(new)}"
        if self._hook_count != RemovableHandle.next_id:
            for slot, then in zip(self._param_slots(), self._hooks, strict=True):
                if _hooks_of(slot.tensor) != then:
                    return f"a hook of {slot.name} was added or removed"
        elif any(self._hooks) and [_hooks_of(p) for p in self._params] != self._hooks:
            return "a hook of a parameter was removed"
        self._remember()
        return None

    def _param_slots(self) -> list[Slot]:
        return [slot for slot in self.state if slot.kind is InputKind.PARAM]

    def _tensors(self) -> str | None:
        assert self._check is not None
        if not self._check.holds():
            for slot, then in zip(self.state, self._descriptions, strict=True):
                if (found := describe(slot.tensor)) != then:
                    return differ(slot.name, then, found)
        try:
            changed = any(map(_grad, self._without_grad)) or None in list(map(_grad, self._with_grad))
        except RuntimeError:  # the truth of a tensor with several elements: so there is a gradient
            changed = True
        if changed or self._with_grad or torch.is_tensor(changed):
            for slot in self._param_slots():
                before = self.grads.get(id(slot.tensor))
                if before is not None and before != (slot.tensor.grad is not None):
                    return f"{slot.name} {'had a' if before else 'had no'} gradient at entry, now it has {'none' if before else 'one'}"
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


def _hooks_of(param: torch.Tensor) -> tuple[Any, ...]:
    later = param._post_accumulate_grad_hooks  # type: ignore[attr-defined]
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
    return [s for i, s in enumerate(state.slots) if s.kind is InputKind.PARAM or i in used and s.kind is not InputKind.GRAD]
