"""When a captured graph may be used again: the signature of a call, and the sentence that says what changed.

[Note: cheap and complete]
Every call checks everything a trace depends on. Comparing thousands of values in Python costs more than many a small
step, so a native look (`native/module.cpp`) stands before the comparison. It may say "perhaps" too often, never "the
same" wrongly; what it names is compared in full, and where there is no native look everything is. It knows:
- Python tells of each write to a dict (3.12 on), or one that was not written has the same version number; a list and a
  closure cell hold the very objects they held;
- the modes of torch;
- of each tensor type, dtype, device, shape, strides and ``requires_grad``, of a parameter its gradient and its hooks.
What lives in a tensor itself (``.data =``, ``resize_``, ``requires_grad_``, ``.grad =``) leaves no trace in any dict,
so every tensor of the state is looked at in every call.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
import torch.fx as fx

from wholestep.capture.functionalize.storage_resize import StorageSizes
from wholestep.capture.guards import fast_guards
from wholestep.capture.native import build
from wholestep.capture.python import tree_util
from wholestep.capture.python.snapshot import Snapshot, same
from wholestep.capture.reach.arguments import leaf_of, path_text
from wholestep.capture.reach.reachability import GLOBAL_HOOKS
from wholestep.capture.reach.train_state import Slot, TrainState
from wholestep.capture.scalars.counters import Counters, VaryingValue, identity, scalar_locations
from wholestep.ir.program import InputKind


def modes() -> tuple[tuple[str, Any], ...]:
    """Global switches of torch that change what a trace means."""
    return (
        ("grad mode", torch.is_grad_enabled()),
        ("inference mode", torch.is_inference_mode_enabled()),
        ("autocast on CPU", torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")),
        ("autocast on CUDA", torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")),
        ("autocast's cache of weights", torch.is_autocast_cache_enabled()),
        ("detection of anomalies", looks_for_nan()),
        ("deterministic algorithms", torch.are_deterministic_algorithms_enabled()),
        ("default dtype", torch.get_default_dtype()),
        ("default device", torch.get_default_device()),
        ("float32 matmul precision", torch.get_float32_matmul_precision()),
        ("number of global module hooks", sum(map(len, GLOBAL_HOOKS))),
    )


def looks_for_nan() -> bool:
    """Whether autograd looks at the values of all gradients."""
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


def describe(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What of a tensor a trace depends on: type, dtype, shape, strides, device, ``requires_grad``, and whether what it
    stands for is conjugate or negative to what lies in memory."""
    return (
        type(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device, tensor.requires_grad,
        tensor.is_conj(), tensor.is_neg(),
    )  # fmt: skip


def aliases_of(leaves: list[Any], is_data: list[bool]) -> list[int]:
    """Per leaf that is data, the number of the first leaf that is the very same tensor."""
    first: dict[int, int] = {}
    return [first.setdefault(id(leaf), number) for number, leaf in enumerate(leaves) if is_data[number]]


def _spell(description: tuple[Any, ...]) -> str:
    kind, dtype, shape, stride, device, *flags = description
    text = f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}"
    names = ("requires_grad", "lazily conjugate", "lazily negative")
    told = "".join(f", {name}" for name, flag in zip(names, flags, strict=True) if flag)
    return f"{text}, strides {list(stride)}, {kind.__name__}{told}"


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
    spec: tree_util.TreeSpec
    aliases: list[int]
    """Per leaf that is data: the first leaf that is the same tensor. See `aliases_of`."""
    snapshots: list[Snapshot]
    grads: dict[int, bool]
    """id of a parameter whose gradient at entry matters -> whether it had one."""
    predicates: tuple[Any, list[Any], list[bool], list[str]] | None
    """Function of host values, their sources, truths while tracing, user's lines."""
    modes: tuple[tuple[str, Any], ...] = field(default_factory=modes)
    counters: Counters | None = None
    """Numbers that the step moves; None where there are none."""
    given: dict[int, Any] = field(default_factory=dict)
    """Numbers among the arguments, by leaf, of which counters take those that are inputs."""
    moving: Sequence[int] = ()
    """The leaves of those that are inputs."""
    unread: Sequence[int] = ()
    """The leaves that may be any text."""
    paths: Sequence[tuple[Any, ...]] = ()
    """Per leaf the way to it."""
    outside: list[Snapshot] = field(default_factory=list)
    """Those of `snapshots` that may hold numbers which the user moves between calls."""
    storages: StorageSizes | None = None
    """Sizes of storages, where the step resizes some or asks for them."""

    def __post_init__(self) -> None:
        params = [slot for slot in self.state if slot.kind is InputKind.PARAM]
        self.state = [*params, *(slot for slot in self.state if slot.kind is not InputKind.PARAM)]
        self._params = params
        self._descriptions = [describe(slot.tensor) for slot in self.state]
        self._state_ids = frozenset(id(slot.tensor) for slot in self.state)
        self._hooks = [_hooks_of(slot.tensor) for slot in params]
        self._entry_kinds = [_kind(slot.tensor.grad) for slot in params]
        self._data = [number for number, data in enumerate(self.is_data) if data]
        self._things = [n for n, data in enumerate(self.is_data) if not data and n not in self.moving]
        self.snapshots = [watch for watch in self.snapshots if watch.guard]
        self._watched = [watch for watch in self.snapshots if fast_guards.guardable(watch) is not None]
        self._opaque = [watch for watch in self.snapshots if fast_guards.guardable(watch) is None]
        self._everything = (fast_guards.MODES, fast_guards.TENSORS, *range(len(self._watched)))
        self._make_quick()

    def _make_quick(self) -> None:
        """The native look and match, once everything is known to be as it was while tracing."""
        tensors = [slot.tensor for slot in self.state]
        containers = [fast_guards.guardable(watch) for watch in self._watched] + [
            (hooks, None) for hooks in GLOBAL_HOOKS
        ]
        self._awaits_native = build.module() is None
        self._look = fast_guards.state_guard(tensors, [self._want(slot) for slot in self.state], containers)
        self._match = fast_guards.signature_guard(
            self.spec, self.leaves, self.is_data, self.aliases, tensors, any_of_type=(*self.moving, *self.unread)
        )

    def _want(self, slot: Slot) -> int:
        """What is looked at of a tensor besides its layout."""
        if slot.kind is not InputKind.PARAM:
            return fast_guards.STATE
        return {None: fast_guards.PARAMETER, False: fast_guards.WITHOUT_GRADIENT, True: fast_guards.WITH_GRADIENT}[
            self.grads.get(id(slot.tensor))
        ]

    def shortcut(self, run: fast_guards.FastRun) -> fast_guards.FastCall | None:
        """The quick way through a call: `run` where this trace holds. None where only `why_not` can tell."""
        if self._match is None or self._look is None:
            return None
        asked = (self.predicates, self.counters, self.storages)
        always = bool(self._opaque) or any(one is not None for one in asked)
        return fast_guards.fast_call(self._match, self._look, self._state_why_not, always, run)

    def why_not(self, leaves: list[Any], spec: tree_util.TreeSpec) -> str | None:
        """Why this trace does not hold for a call with these arguments, in one sentence; None if it holds."""
        moved = self._look.moved() if self._look is not None else self._everything
        return self._arguments(leaves, spec) or self._state_why_not(leaves, moved)

    def _state_why_not(self, leaves: list[Any], moved: tuple[int, ...]) -> str | None:
        if moved or self._opaque:
            if (why_not := self._compare(moved)) is not None:
                return why_not
            if self._look is not None:
                self._look.renew()
            elif self._awaits_native and build.module() is not None:
                self._make_quick()
        for leaf in self.moving:
            self.given[leaf] = leaves[leaf]
        if self.counters is not None and (why_not := self.counters.why_not()) is not None:
            return why_not
        if self.predicates is not None and (why_not := self._branches()) is not None:
            return why_not
        return self.storages.why_not(leaves) if self.storages is not None else None

    def _arguments(self, leaves: list[Any], spec: tree_util.TreeSpec) -> str | None:
        if spec is not self.spec and spec != self.spec:
            way, then, now = tree_util.difference(self.spec, spec)
            return f"{path_text(way) if len(way) > 1 else 'the call'} was {then}, is {now}"
        held = self.leaves
        for number in self._things:
            then, now = held[number], leaves[number]
            if number in self.unread and type(now) is str:
                continue
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

    def others(self, leaves: list[Any]) -> Iterator[VaryingValue]:
        """Numbers and texts that were constants, and are others for a call with these leaves."""
        for leaf in self._things if len(leaves) == len(self.leaves) else ():
            one = leaf_of(self.paths[leaf], leaves[leaf]) if leaf not in self.unread else None
            if one is not None and not same(self.leaves[leaf], leaves[leaf]):
                yield one
        for watch in self.outside:
            if watch.guard and not _untouched(watch):
                for key, path, then, now in watch.changed_items():
                    if key is not None and _is_other(then, now):
                        yield from scalar_locations(watch.container, key, path, (then, now))

    def other_tensors(self) -> Iterator[Hashable]:
        """Places in which another tensor stands than in the trace, one of which the trace depends on the same."""
        for watch in self.outside:
            if watch.guard and not _untouched(watch):
                for key, _, then, now in watch.changed_items():
                    both = key is not None and isinstance(then, torch.Tensor) and isinstance(now, torch.Tensor)
                    if both and describe(then) == describe(now):
                        yield identity(watch.container), key

    def _repeats(self, leaves: list[Any]) -> str | None:
        """The same tensor given twice is one input of the graph, so it must be given twice again, and no other."""
        if len(self._data) < 2:
            return None
        for number, then, now in zip(self._data, self.aliases, aliases_of(leaves, self.is_data), strict=True):
            if then != now:
                was, is_now = (_alias(number, one) for one in (then, now))
                return f"argument {number} was {was}, is {is_now}"
        return None

    def _compare(self, moved: tuple[int, ...]) -> str | None:
        """Compares in full what may have changed."""
        numbers = [number for number in moved if number >= 0]
        other_modes = fast_guards.MODES in moved or max(numbers, default=0) >= len(self._watched)
        if other_modes and self.modes != (now := modes()):
            return "; ".join(f"{a[0]} was {a[1]}, is {b[1]}" for a, b in zip(self.modes, now, strict=True) if a != b)
        snapshots = [self._watched[number] for number in sorted(numbers) if number < len(self._watched)]
        for watch in (*snapshots, *self._opaque):
            if not _untouched(watch):
                for path, then, new in watch.changes():
                    return f"{path} was {_short(then)}, is {_short(new)}"
        return self._tensors() if fast_guards.TENSORS in moved else None

    def _tensors(self) -> str | None:
        for slot, hooks in zip(self._params, self._hooks, strict=True):
            if not _same_hooks(_hooks_of(slot.tensor), hooks):
                return f"a hook of {slot.name} was added or removed"
        for slot, then in zip(self.state, self._descriptions, strict=True):
            if (found := describe(slot.tensor)) != then:
                return differ(slot.name, then, found)
        for slot, kind in zip(self._params, self._entry_kinds, strict=True):
            # By identity: a gradient may be zero, and then it is not true.
            before, now = self.grads.get(id(slot.tensor)), slot.tensor.grad is not None
            if before is not None and before != now:
                was, is_now = ("a", "none") if before else ("no", "one")
                return f"{slot.name} had {was} gradient at entry, now it has {is_now}"
            if before and (new := _kind(slot.tensor.grad)) != kind:
                return f"the gradient of {slot.name} at entry was {_spell_kind(kind)}, is {_spell_kind(new)}"
        return None

    def _branches(self) -> str | None:
        assert self.predicates is not None
        function, sources, truths, lines = self.predicates
        with torch.no_grad():
            found = function(*(source() for source in sources))
        for then, now, line in zip(truths, found, lines, strict=True):
            if then != now:
                return f"the condition at {line} was {then}, is {now}"
        return None


def _is_other(then: Any, now: Any) -> bool:
    return type(now) in (int, float) and not same(then, now)


def _kind(grad: torch.Tensor | None) -> tuple[Any, ...]:
    """What of a gradient at entry a trace depends on. Its shape is that of the parameter."""
    return (type(grad), grad.dtype, grad.layout, grad.device) if grad is not None else ()


def _spell_kind(kind: tuple[Any, ...]) -> str:
    return ", ".join(one.__name__ if isinstance(one, type) else str(one).removeprefix("torch.") for one in kind)


def _untouched(watch: Snapshot) -> bool:
    """Whether a container holds the very objects it held: the usual case, told sooner than by `Snapshot.changes`."""
    now, then = watch.container, watch.held
    if type(now) not in fast_guards.VERSIONED or len(now) != len(then):
        return False
    return all(map(is_, now.values(), then.values())) and all(map(is_, now, then))


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


def state_slots(state: TrainState, used: set[int]) -> list[Slot]:
    """The slots whose description a trace depends on: every parameter, and what the graph reads."""
    read = (slot for number, slot in enumerate(state.slots) if number in used or slot.kind is InputKind.PARAM)
    return [slot for slot in read if slot.kind is not InputKind.GRAD]
