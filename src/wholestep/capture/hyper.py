"""Numbers in param_groups as inputs of the graph, read anew at every call.

[Note: two ways to lift a number]
Ordinary optimizers take a symbolic float wherever they take a float, so the number enters the trace as
``box.item()`` of a 0-d float64 input: the very arithmetic of eager Python, node by node. Fused kernels
(``_fused_adamw_`` and kin) take only true floats. Their numbers enter as a *payload*, a float with a bit
pattern of its own next to the true value, and every payload in the finished graph is replaced by the input.
What is not a float (flags, names, counts) is watched by value instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch.optim import Optimizer

from wholestep.capture.walk import Watch
from wholestep.program import meta

_BY_VALUE: dict[type[Optimizer], tuple[str, ...]] = {torch.optim.ASGD: ("alpha",)}
"""Numbers that are watched by value: torch 2.11 has no fake kernel for a tensor to the power of a symbolic float."""


@dataclass(slots=True)
class Hyper:
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


@dataclass(slots=True)
class KindWatch(Watch):
    """Watches what kind of thing the lifted numbers are: a rate that becomes a tensor means another graph."""

    def now(self) -> dict[str, Any]:
        """Per key the kind, or for a tuple the kinds of its items. A subclass of float (numpy's) is a float."""
        held = {key: self.container.get(key) for key in self.keys or ()}
        return {key: tuple(map(_kind, one)) if isinstance(one, tuple) else _kind(one) for key, one in held.items()}


def _kind(thing: Any) -> type:
    return float if isinstance(thing, float) else type(thing)


class Lifter:
    """Lifts the numbers of all parameter groups for the time of one trace."""

    def __init__(self, optimizers: list[tuple[str, Optimizer]]) -> None:
        self.hypers: list[Hyper] = []
        self.watches: list[Watch] = []
        self._saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._payloads: dict[float, Hyper] = {}
        self._installed: list[Any] = []
        for name, opt in optimizers:
            for g, group in enumerate(opt.param_groups):
                self._lift_group(
                    f"{name}.groups.{g}", group, [k for k in group if k in opt.defaults], _BY_VALUE.get(type(opt), ())
                )

    def _lift_group(self, name: str, group: dict[str, Any], keys: list[str], by_value: tuple[str, ...]) -> None:
        fused = bool(group.get("fused"))
        self._saved.append((group, {key: group[key] for key in keys}))
        plain = []
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
            if not lifted:
                plain.append(key)
        watch = Watch(group, name, tuple(plain))
        watch.held = watch.now()
        self.watches.append(watch)
        kinds = KindWatch(group, name, tuple(key for key in keys if key not in plain))
        kinds.held = kinds.now()
        self.watches.append(kinds)

    def _lift(self, name: str, group: dict[str, Any], key: str, position: int | None, fused: bool) -> bool:
        hyper = Hyper(name, group, key, position, torch.empty((), dtype=torch.float64))
        number = hyper.read()
        hyper.box.fill_(number)
        if fused:
            if number == 0.0 or not math.isfinite(number):
                return False  # a zero switches a fused kernel's branch off: watched by value
            hyper.payload = number
            while hyper.payload in self._payloads or hyper.payload in _COMMON:
                hyper.payload = math.nextafter(hyper.payload, math.inf)
            self._payloads[hyper.payload] = hyper
        self.hypers.append(hyper)
        return True

    def install(self) -> None:
        """Puts symbolic floats (or payloads) into the groups. Called inside the trace, where boxes are traced."""
        self._installed = []
        for hyper in self.hypers:
            symbol = hyper.payload if hyper.payload is not None else hyper.box.item()
            self._installed.append(symbol)
            hyper.write(symbol)

    def rewritten(self) -> Hyper | None:
        """The first number that the step itself has changed; None if it changed none."""
        for hyper, symbol in zip(self.hypers, self._installed, strict=True):
            held = hyper.group[hyper.key]
            if (held if hyper.position is None else held[hyper.position]) is not symbol:
                return hyper
        return None

    def restore(self) -> None:
        """Puts the numbers back."""
        for group, held in self._saved:
            group.update(held)

    def replace_payloads(self, graph: fx.Graph, inputs: dict[int, fx.Node]) -> None:
        """Replaces every payload in fused kernels by the input of its number. `inputs`: id of a box -> placeholder."""
        items: dict[float, fx.Node] = {}
        last = graph.find_nodes(op="placeholder")[-1] if self._payloads else None

        def swap(arg: Any) -> Any:
            if isinstance(arg, float) and arg in self._payloads:
                if arg not in items:
                    assert last is not None
                    with graph.inserting_after(last):
                        box = inputs[id(self._payloads[arg].box)]
                        items[arg] = graph.call_function(torch.ops.aten._local_scalar_dense.default, (box,))
                    meta.set_value(items[arg], self._payloads[arg].read())
                    meta.set_origin(items[arg], meta.Origin(meta.Region.OPTIMIZER))
                return items[arg]
            return arg

        for node in list(graph.nodes):
            if node.op == "call_function" and "_fused_" in str(node.target) and self._payloads:
                node.args = fx.node.map_aggregate(node.args, swap)
                node.kwargs = fx.node.map_aggregate(node.kwargs, swap)


_COMMON = frozenset({0.0, 1.0, -1.0, 0.5, 2.0})
"""Constants that a kernel may be called with for reasons of its own."""
