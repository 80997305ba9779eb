"""Numbers in param_groups as inputs of the graph, read anew at every call.

[Note: two ways to lift a number]
Ordinary optimizers take a symbolic float wherever they take a float, so the number enters the trace as
``box.item()`` of a 0-d float64 input: the very arithmetic of eager Python, node by node. Fused kernels
(``_fused_adamw_`` and kin) take only true floats. What they are given in the place of a symbolic one is a *payload*, a
float with a bit pattern of its own next to the true value, and every payload in the finished graph is replaced by the
input. All else that reads the group sees the symbolic float. What is not a float (flags, names, counts) is watched by
value instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.fx as fx
from torch.optim import Optimizer

from wholestep.capture.python.snapshot import Snapshot
from wholestep.capture.python.tracing_thread import on_this_thread
from wholestep.errors import CaptureError
from wholestep.ir import node_meta

_BY_VALUE: dict[type[Optimizer], tuple[str, ...]] = {
    torch.optim.ASGD: ("alpha",),  # torch 2.11 has no fake kernel for a tensor to the power of a symbolic float
    torch.optim.Muon: ("ns_coefficients",),  # factors of products, which take numbers of the host: no CUDA graph could
}
"""Numbers that are watched by value: no schedule moves them, and an operator wants them plain."""


@dataclass(slots=True)
class Hyperparameter:
    """One number of a parameter group."""

    name: str
    group: dict[str, Any]
    key: str
    position: int | None
    """Place in a tuple such as ``betas``; None where the entry is the number itself."""
    box: torch.Tensor
    """0-d float64 CPU tensor: what the graph reads."""
    payload: float | None = None
    """Stands for the number in fused kernels, whose schemas take no symbolic float."""

    def read(self) -> float:
        """The number as it is now."""
        held = self.group[self.key]
        return float(held if self.position is None else held[self.position])

    def write(self, number: Any) -> None:
        """Puts another number, or what stands for one, in its place."""
        if self.position is not None:
            items = list(self.group[self.key])
            items[self.position] = number
            number = tuple(items)
        self.group[self.key] = number


_OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"})
"""What schedulers of torch put into groups for themselves, maybe after the first call."""

_GIVEN = {
    "step", "_opt_called", "_step_count", "_warned_capturable_if_run_uncaptured", "grad_scale", "found_inf",
    "_need_device_dtype_check_for_fused",
}  # fmt: skip


@cache
def torch_group_keys() -> frozenset[str]:
    """Attributes that optimizers have of torch, or that schedulers and scalers give them."""
    return frozenset(vars(torch.optim.SGD([torch.zeros((), device="cpu")]))) | _GIVEN


@dataclass(slots=True)
class GroupSnapshot(Snapshot):
    """Watches one parameter group: of numbers that the graph reads their kind, since a rate that becomes a tensor means
    another graph; the rest by value."""

    lifted: frozenset[str] = frozenset()

    def now(self) -> dict[str, Any]:
        """Per key the value or the kind, or for a tuple the kinds of its items. A subclass of float is a float."""
        left_out = {"params", *_OF_SCHEDULERS.difference(self.keys or ())}
        held = {key: one for key, one in self.container.items() if key not in left_out}
        return {key: _kinds(one) if key in self.lifted else one for key, one in held.items()}


@dataclass(slots=True)
class AttributesSnapshot(Snapshot):
    """Watches the attributes of an optimizer that are its own and no part of torch's."""

    def now(self) -> dict[str, Any]:
        """By name."""
        return {key: one for key, one in self.container.items() if key not in torch_group_keys()}


def _kinds(thing: Any) -> Any:
    return tuple(map(_kind, thing)) if isinstance(thing, tuple) else _kind(thing)


def _kind(thing: Any) -> type:
    return float if isinstance(thing, float) else type(thing)


class HyperparameterLifter:
    """Lifts the numbers of all parameter groups for the time of one trace."""

    def __init__(self, optimizers: list[tuple[str, Optimizer]]) -> None:
        self.hypers: list[Hyperparameter] = []
        self.snapshots: list[GroupSnapshot] = []
        """Of the groups."""
        self.attributes: list[Snapshot] = []
        """Of what the optimizers are besides."""
        self._saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._payloads: dict[float, Hyperparameter] = {}
        self._installed: list[Any] = []
        groups: set[int] = set()  # an optimizer around another one may share its groups
        for name, opt in optimizers:
            self.attributes.append(AttributesSnapshot(vars(opt), name, None))
            for g, group in enumerate(opt.param_groups):
                if id(group) not in groups:
                    self._lift_group(f"{name}.groups.{g}", group, _BY_VALUE.get(type(opt), ()))
                groups.add(id(group))
        for watch in (*self.snapshots, *self.attributes):
            watch.held = watch.now()

    def _lift_group(self, name: str, group: dict[str, Any], by_value: tuple[str, ...]) -> None:
        fused = bool(group.get("fused"))
        keys = [key for key in group if key != "params"]
        before, found = dict(group), set()
        for key in keys:
            held = group[key]
            if key in by_value:
                lifted = False
            elif isinstance(held, float):
                lifted = self._lift(f"{name}.{key}", group, key, None, fused)
            elif isinstance(held, tuple) and held and all(isinstance(item, float) for item in held):
                each = [self._lift(f"{name}.{key}.{i}", group, key, i, fused) for i in range(len(held))]
                lifted = all(each)
            else:
                lifted = False
            if lifted:
                found.add(key)
        read = {hyper.key for hyper in self.hypers if hyper.group is group}  # of betas one may be read and one watched
        self._saved.append((group, {key: before[key] for key in read}))
        self.snapshots.append(GroupSnapshot(group, name, tuple(group), lifted=frozenset(found)))

    def _lift(self, name: str, group: dict[str, Any], key: str, position: int | None, fused: bool) -> bool:
        hyper = Hyperparameter(name, group, key, position, torch.empty((), dtype=torch.float64, device="cpu"))
        number = hyper.read()
        hyper.box.fill_(number)
        if fused:
            if number == 0.0 or not math.isfinite(number):
                return False  # a zero switches a fused kernel's branch off: watched by value
            hyper.payload = self._unused(number)
            self._payloads[hyper.payload] = hyper
        self.hypers.append(hyper)
        return True

    def install(self) -> None:
        """Puts symbolic floats into the groups. Called inside the trace, where boxes are traced."""
        self._installed = []
        for hyper in self.hypers:
            symbol = hyper.box.item()
            self._installed.append(symbol)
            hyper.write(symbol)

    def changed(self) -> Hyperparameter | None:
        """In the trace, at its end: a number that the step itself has changed."""
        for hyper, symbol in zip(self.hypers, self._installed, strict=True):
            held: Any = hyper.group.get(hyper.key)
            if hyper.position is not None:
                held = held[hyper.position] if isinstance(held, tuple) and hyper.position < len(held) else None
            if held is not symbol:
                return hyper
        return None

    @contextmanager
    def fused_kernels(self) -> Iterator[None]:
        """While it is open, fused kernels are given payloads in the place of symbolic floats."""
        with ExitStack() as stack:
            for name in _FUSED:
                original = getattr(torch, name)
                stack.enter_context(patch.object(torch, name, on_this_thread(self._with_payloads(original), original)))
            yield

    def _with_payloads(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return kernel(*args, **{name: self._payload(one) for name, one in kwargs.items()})

        return call

    def _payload(self, argument: Any) -> Any:
        if not isinstance(argument, torch.SymFloat):
            return argument
        for hyper, symbol in zip(self.hypers, self._installed, strict=True):
            if symbol is argument and hyper.payload is not None:
                return hyper.payload
        raise CaptureError(
            "The step gives a fused kernel of an optimizer a number that it computes itself. Use fused=False."
        )

    def _unused(self, payload: float) -> float:
        while payload in self._payloads or payload in _COMMON:
            payload = math.nextafter(payload, math.inf)
        return payload

    def restore(self) -> None:
        """Puts the numbers back."""
        for group, held in self._saved:
            group.update(held)

    def replace_payloads(self, graph: fx.Graph, inputs: dict[int, fx.Node]) -> None:
        """Replaces every payload in fused kernels by the input of its number. `inputs`: id of a box -> placeholder."""
        if not self._payloads:
            return
        items: dict[float, fx.Node] = {}
        last = graph.find_nodes(op="placeholder")[-1]

        def swap(arg: Any) -> Any:
            if isinstance(arg, float) and arg in self._payloads:
                if arg not in items:
                    with graph.inserting_after(last):
                        box = inputs[id(self._payloads[arg].box)]
                        items[arg] = graph.call_function(torch.ops.aten._local_scalar_dense.default, (box,))
                    node_meta.set_value(items[arg], self._payloads[arg].read())
                    node_meta.set_origin(items[arg], node_meta.Origin(node_meta.Region.OPTIMIZER))
                return items[arg]
            return arg

        for node in list(graph.nodes):
            if node.op == "call_function" and "_fused_" in str(node.target):
                node.args = fx.node.map_aggregate(node.args, swap)
                node.kwargs = fx.node.map_aggregate(node.kwargs, swap)


_FUSED = [name for name in (f"_fused_{kind}_" for kind in ("adam", "adamw", "sgd", "adagrad")) if hasattr(torch, name)]
"""What optimizers call by these names of torch."""

_COMMON = frozenset({0.0, 1.0, -1.0, 0.5, 2.0})
"""Constants that a kernel may be called with for reasons of its own."""
