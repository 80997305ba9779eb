"""State of a step as named inputs: parameters, buffers, gradients, optimizer state, tensors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer

from wholestep.capture.python import tree_util
from wholestep.capture.python.tracing_thread import on_this_thread
from wholestep.capture.python.user_frame import current_line
from wholestep.capture.reach.reachable import Reachable
from wholestep.capture.wrappers import tensor_parallel
from wholestep.errors import CaptureError, HyperparameterError, LazyParameterError
from wholestep.ir.dtensor.layouts import place_zeros
from wholestep.ir.dtensor.shards import is_dtensor
from wholestep.ir.program import InputKind
from wholestep.util.gradient_node import is_leaf


@dataclass(slots=True)
class Slot:
    """One tensor that is an input of the graph."""

    kind: InputKind
    name: str
    tensor: torch.Tensor


@dataclass(slots=True)
class TrainState:
    """Every tensor that outlives a call, once each, in an order that is the same on every rank."""

    slots: list[Slot] = field(default_factory=list)
    index: dict[int, int] = field(default_factory=dict)
    """id of a tensor -> its place in `slots`."""
    optimizers: list[tuple[str, Optimizer]] = field(default_factory=list)

    def add(self, kind: InputKind, name: str, tensor: torch.Tensor) -> None:
        """Adds a tensor unless it is there already (tied weights are one input)."""
        if id(tensor) not in self.index:
            self.index[id(tensor)] = len(self.slots)
            self.slots.append(Slot(kind, name, tensor))

    def of_kind(self, *kinds: InputKind) -> Iterator[Slot]:
        """The slots of some kinds, in order."""
        return (slot for slot in self.slots if slot.kind in kinds)

    def name_of(self, tensor: torch.Tensor) -> str:
        """The name of a tensor that is in the state."""
        return self.slots[self.index[id(tensor)]].name

    def takes(self, then: Any, now: Any) -> bool:
        """Whether `then` is a tensor of the state that can take the values of `now`, another one."""
        if not (isinstance(then, torch.Tensor) and isinstance(now, torch.Tensor)) or id(then) not in self.index:
            return False
        return then.shape == now.shape and then.dtype == now.dtype and not then.requires_grad

    def write(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Gives the first of each pair the values of the second one, all of them as they were before."""
        with torch.no_grad():
            values = [now.clone() if id(now) in self.index else now for _, now in pairs]  # two may swap
            for (then, _), value in zip(pairs, values, strict=True):
                then.copy_(value)

    @property
    def params(self) -> list[Slot]:
        """Parameters, in order."""
        return list(self.of_kind(InputKind.PARAM))


@dataclass(frozen=True, slots=True)
class Address:
    """Where an optimizer keeps something: in the state of a parameter, in a group, or else in an attribute."""

    optimizer: int
    key: Any
    group: int | None = None
    slot: int | None = None
    """Of the parameter; -1 for its whole state, where some keep what belongs to no parameter."""

    def holder(self, state: TrainState) -> Callable[[], dict[Any, Any]]:
        """What gives the dict with that key, which the optimizer may replace between calls."""
        opt = state.optimizers[self.optimizer][1]
        if self.slot == -1:
            return lambda: opt.state
        if self.slot is not None:
            param = state.slots[self.slot].tensor
            return lambda: opt.state[param]
        return lambda: vars(opt) if self.group is None else opt.param_groups[self.group]

    def spelled(self, state: TrainState) -> str:
        """A name for it."""
        parts = [state.optimizers[self.optimizer][0]]
        parts += [] if self.group is None else ["groups", str(self.group)]
        return ".".join([*parts, str(self.key), *([] if self.slot in (None, -1) else [state.slots[self.slot].name])])


def collect(found: Reachable) -> TrainState:
    """Gives all tensors that outlive a call a name and a fixed order.

    Raises LazyParameterError for parameters without a shape.
    """
    state = TrainState(optimizers=[_named(opt) for opt in found.optimizers.values()])
    single = len(found.modules) == 1
    for wanted in (InputKind.PARAM, InputKind.BUFFER):
        for root, module in found.modules.values():
            prefix = "" if single else root + "."
            tensors: Iterable[tuple[str, torch.Tensor]]
            tensors = module.named_parameters() if wanted is InputKind.PARAM else module.named_buffers()
            for fqn, tensor in tensors:
                state.add(wanted, prefix + fqn, tensor)
    for name, opt in state.optimizers:
        for g, group in enumerate(opt.param_groups):
            for i, param in enumerate(group["params"]):
                loose = found.tensors.get(id(param))
                state.add(InputKind.PARAM, loose[0] if loose else f"{name}.params.{g}.{i}", param)
    _refuse_lazy(state)
    for name, tensor in found.tensors.values():
        if is_loose_parameter(tensor):
            state.add(InputKind.PARAM, name, tensor)
    for name, opt in state.optimizers:
        _add_optimizer(state, name, opt)
    for name, tensor in found.tensors.values():
        state.add(InputKind.TENSOR, name, tensor)
    for slot in state.params:
        if slot.tensor.grad is not None:
            state.add(InputKind.GRAD, f"{slot.name}.grad", slot.tensor.grad)
    return state


def is_loose_parameter(tensor: torch.Tensor) -> bool:
    """Whether a tensor of no module and no optimizer has a gradient, or may get one. Frozen, it may still have one, and
    a parameter may be thawed."""
    may_get_one = tensor.requires_grad or isinstance(tensor, nn.Parameter)
    return is_leaf(tensor) and (may_get_one or tensor.grad is not None)


def parallel_parameters(found: Reachable, state: TrainState) -> list[str]:
    """Names of the parameters of ``parallelize_module``."""
    roots = (root for _, root in found.modules.values())
    return tensor_parallel.parallel_parameters(roots, ((slot.name, slot.tensor) for slot in state.params))


def _refuse_lazy(state: TrainState) -> None:
    for slot in state.slots:
        if nn.parameter.is_lazy(slot.tensor):
            raise LazyParameterError(
                f"{slot.name} has no shape yet: it belongs to a lazy module, which makes its parameters in the first "
                f"forward. Call the model once on a batch, under torch.no_grad(), before the step."
            )


def _named(entry: tuple[str, Optimizer]) -> tuple[str, Optimizer]:
    return entry[0].removeprefix("self."), entry[1]


def _add_optimizer(state: TrainState, name: str, opt: Optimizer) -> None:
    for g, group in enumerate(opt.param_groups):
        for key, item in group.items():
            if isinstance(item, torch.Tensor):
                state.add(InputKind.OPTIMIZER, f"{name}.groups.{g}.{key}", item)
        for param in group["params"]:
            for keys, leaf in tree_util.leaves_with_keys(opt.state.get(param, {})):
                if isinstance(leaf, torch.Tensor):
                    state.add(InputKind.OPTIMIZER, f"{name}.{'.'.join(map(str, keys))}.{state.name_of(param)}", leaf)
    for loose, held in opt.state.items():
        if isinstance(held, torch.Tensor):
            state.add(InputKind.OPTIMIZER, f"{name}.{loose}", held)


def states(opt: Optimizer) -> list[tuple[torch.Tensor, dict[Any, Any]]]:
    """The state of each parameter. (Some keep other things there, under names of their own.)"""
    return [(key, held) for key, held in opt.state.items() if isinstance(key, torch.Tensor) and isinstance(held, dict)]


def _lists_of_state(kind: type) -> int | None:
    """How many lists ``_init_group`` of an optimizer fills: as many as the first class says that takes no ``*args``."""
    for base in kind.__mro__:
        if "_init_group" in vars(base):
            parameters = inspect.signature(vars(base)["_init_group"]).parameters.values()
            if all(one.kind is not inspect.Parameter.VAR_POSITIONAL for one in parameters):
                return len(parameters) - 2
    return None


CutState = Callable[[torch.Tensor, dict[Any, Any]], None]
"""Cuts the optimizer state of a parameter, in place, where a strategy shards it and not the parameter."""


class LazyState:
    """Creates the optimizer state that a first ``step()`` would create, without taking one.

    The state of torch's optimizers is made by ``_init_group``. It is called with gradients of zero bytes in
    memory. State that the trace then shows to be unused is taken back, so ``state_dict()`` is what eager
    training would have left. Optimizers without it create their state in the graph.
    """

    def __init__(self, optimizers: list[tuple[str, Optimizer]], cut: CutState | None = None) -> None:
        """`cut` is called with each parameter and its new state: never is all of it there at once."""
        self.created: list[tuple[Optimizer, torch.Tensor]] = []
        self._cut = cut
        for name, opt in optimizers:
            _refuse_optimizer(name, opt)
            if (num_lists := _lists_of_state(type(opt))) is not None:
                with torch.device("cpu"):  # counters belong there, whatever the default device
                    self._create(opt, num_lists)

    def _create(self, opt: Optimizer, num_lists: int) -> None:
        params = [param for group in opt.param_groups for param in group["params"]]
        moved = [p for p in params if p.requires_grad or p.grad is not None]  # a frozen one is updated by what it has
        fresh = [p for p in moved if not opt.state.get(p)]
        saved = [(p, p.grad) for p in fresh]
        others = [(p, p.grad) for p in moved if p.grad is not None and opt.state.get(p)]
        for param, _ in others:
            param.grad = None  # so that _init_group touches only the fresh ones
        try:
            for param in fresh:
                param.grad = _zeros_without_memory(param)
            for group in opt.param_groups:
                self._create_group(opt, group, num_lists, fresh)
        finally:
            for param, grad in [*saved, *others]:
                param.grad = grad
        for param in fresh:
            if opt.state.get(param):
                self.created.append((opt, param))
            else:
                opt.state.pop(param, None)

    def _create_group(self, opt: Optimizer, group: dict[str, Any], num_lists: int, fresh: list[torch.Tensor]) -> None:
        known = {id(one) for one in fresh}
        for few in [group] if self._cut is None else [{**group, "params": [one]} for one in group["params"]]:
            opt._init_group(few, *([] for _ in range(num_lists)))  # type: ignore[attr-defined]
            if isinstance(opt, SGD):
                self._create_momentum(opt, few, fresh)
            for param in few["params"]:
                if self._cut is not None and id(param) in known and opt.state.get(param):
                    self._cut(param, opt.state[param])

    @staticmethod
    def _create_momentum(opt: Optimizer, group: dict[str, Any], fresh: list[torch.Tensor]) -> None:
        # SGD's first step sets the buffer to the gradient: with zeros and no dampening, 0 * m + g is the same.
        # With dampening the first step differs in kind; then the buffer is created in the graph.
        known = {id(p) for p in fresh}
        for param in group["params"]:
            if id(param) in known and group["momentum"] != 0 and not group["dampening"]:
                opt.state[param]["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            elif id(param) in known:
                opt.state.pop(param, None)

    def _place_momentum(self, opt: SGD) -> None:
        """Gives momentum the placements that SGD's own has, which begins as a copy of the first gradient."""
        for owner, param in self.created:
            buffer = opt.state[param].get("momentum_buffer") if owner is opt and param in opt.state else None
            if not (is_dtensor(buffer) and is_dtensor(param.grad)):
                continue
            placements = tensor_parallel.placements_of_copy(param.grad)
            if not place_zeros(buffer, placements):
                raise CaptureError(
                    f"SGD makes the momentum of a DTensor of {list(param.shape)} at {current_line()}, placed as "
                    f"{placements} like its gradient, which is not how the parameter is placed. Call the first step "
                    f"outside of this one."
                )

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While open, the state of an optimizer is what it would be without `created`, to who looks at it.

        A step makes state in ``_init_group``, after the closure that it is given, of parameters with gradients. That
        of others is put aside then, and is there again afterwards. Raises CaptureError where someone looks earlier, or
        where a second step would make what the first one did not.
        """
        waiting = {id(opt) for opt, _ in self.created}
        aside: list[tuple[Optimizer, torch.Tensor, Any]] = []

        def look(opt: Optimizer) -> Any:
            if id(opt) in waiting:
                raise CaptureError(
                    f"The step looks at the state of {type(opt).__name__} at {current_line()}, which has made no step "
                    f"so far. For the graph it is made beforehand. Look at it outside of the step."
                )
            return vars(opt)["state"]

        def put(opt: Optimizer, state: Any) -> None:
            vars(opt)["state"] = state

        def making(original: Callable[..., Any]) -> Callable[..., Any]:
            def init_group(opt: Optimizer, *args: Any, **kwargs: Any) -> Any:
                waiting.discard(id(opt))
                if any(owner is opt and param.grad is not None for owner, param, _ in aside):
                    raise CaptureError(
                        f"{type(opt).__name__} makes a second step at {current_line()}, with gradients that were not "
                        f"there in its first one, which makes its state. Call the first step outside of this one."
                    )
                missing = [param for owner, param in self.created if owner is opt and param.grad is None]
                aside.extend((opt, param, opt.state.pop(param)) for param in missing if param in opt.state)
                if isinstance(opt, SGD):
                    self._place_momentum(opt)
                return original(opt, *args, **kwargs)

            return functools.wraps(original)(on_this_thread(init_group, original))

        original = lambda opt: vars(opt)["state"]  # noqa: E731
        looks = patch.object(Optimizer, "state", property(on_this_thread(look, original), put), create=True)
        kinds: set[Any] = {type(opt) for opt, _ in self.created}
        makes: list[Any] = [patch.object(kind, "_init_group", making(kind._init_group)) for kind in kinds]
        with ExitStack() as stack:
            for one in (looks, *makes):
                stack.enter_context(one)
            try:
                yield
            finally:
                for opt, param, state in aside:
                    vars(opt)["state"][param] = state

    def discard(self, used: Set[int] = frozenset(), steppers: Set[int] = frozenset()) -> None:
        """Removes created state but for that with a tensor whose id is in `used`, and that of parameters whose id is.

        Of a parameter that several optimizers have, those keep it whose id is in `steppers`.
        """
        for opt, param in self.created:
            is_stepped = id(opt) in steppers and id(param) in used
            if not is_stepped and used.isdisjoint(map(id, opt.state.get(param, {}).values())):
                opt.state.pop(param, None)


def _zeros_without_memory(param: torch.Tensor) -> torch.Tensor:
    zero = torch.zeros((), dtype=param.dtype, device=param.device)
    if not is_dtensor(param):
        return zero.expand(param.shape)
    local = zero.expand(param.to_local().shape)
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def _refuse_optimizer(name: str, opt: Optimizer) -> None:
    if isinstance(opt, torch.optim.LBFGS):
        raise HyperparameterError(
            f"{name} is LBFGS: its step calls the closure a number of times that depends on the loss, so it has no "
            f"fixed graph. Use an optimizer with a fixed update rule, or run this step without wholestep."
        )
    if isinstance(opt, torch.optim.SparseAdam):
        raise HyperparameterError(
            f"{name} is SparseAdam: it counts steps in a Python number and works on sparse gradients, neither of which "
            f"can be an input of the graph. Use Adam with a dense embedding (sparse=False)."
        )


def check_devices(state: TrainState, user: list[torch.Tensor]) -> None:
    """Raises CaptureError when parameters and arguments live on different kinds of device.

    A buffer that is one number may stay on the CPU: it counts calls, as AveragedModel's does.
    """
    by_device: dict[str, str] = {}
    for slot in state.of_kind(InputKind.PARAM, InputKind.BUFFER):
        if slot.kind is InputKind.BUFFER and slot.tensor.dim() == 0 and slot.tensor.device.type == "cpu":
            continue
        by_device.setdefault(str(slot.tensor.device), slot.name)
    for index, tensor in enumerate(user):
        if tensor.dim() > 0:
            by_device.setdefault(str(tensor.device), f"argument tensor {index}")
    if len(by_device) > 1:
        listing = ", ".join(f"{name} on {device}" for device, name in by_device.items())
        raise CaptureError(f"The step mixes devices: {listing}. Move all of them to one device.")
