"""The interpreter of placement: rewrites a captured graph by a strategy's rules.

[Note: writing, not tracing]
Every node of the new graph is either a copy of an old one or emitted by a rule, which computes its value on
fake tensors. Nothing else is executed, so host scalars pass through untouched, an unchanged part costs a
copy, and no rank number can enter the graph: the interpreter knows sizes and group names, never a rank.

A rule is looked up by operator (`wholestep.place.rules.RULES`); a node without one is copied. Where inputs are
sharded, `wholestep.place.sharded_placer` is the interpreter: it has more rules (`wholestep.place.sharded_rules`), and
gathers what an operator without one reads.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.fx as fx

from wholestep.ir import graph_edit, node_meta
from wholestep.ir.lazy_graph_module import module_of
from wholestep.ir.program import MeshAxis, Program, Stage


class Strategy(Protocol):
    """What a strategy decides. The interpreter asks; the strategy emits nodes through it."""

    @property
    def axes(self) -> tuple[MeshAxis, ...]:
        """The mesh axes that data is spread over."""
        ...

    @property
    def axis(self) -> MeshAxis:
        """The first of them, over which state may be cut."""
        ...

    def begin(self, placer: Placer) -> None:
        """Called once, after the inputs are written and before the first operation."""
        ...

    def reduce_gradient(self, placer: Placer, grad: fx.Node, name: str) -> fx.Node:
        """Emits the reduction of a parameter's local gradient over the whole batch."""
        ...


class Rule(Protocol):
    """Emits the counterpart of one node.

    Arguments are those of the old node, in terms of the new graph.
    """

    def __call__(self, placer: Placer, node: fx.Node, args: Any, kwargs: Any) -> Any: ...


class Placer:
    """One placement under way: `old` is read, `graph` is written."""

    def __init__(self, program: Program, strategy: Strategy, rules: Mapping[Any, Rule]) -> None:
        self.program, self.strategy, self.rules = program, strategy, rules
        self.graph = fx.Graph()
        self.values: dict[fx.Node, Any] = {}
        """Old node -> what stands for it in the new graph."""
        self.notes: list[str] = []
        self._names: Counter[str] = Counter()

    def emit(self, target: Any, *args: Any, like: fx.Node, **kwargs: Any) -> fx.Node:
        """Adds a call whose value is computed on fake tensors; its origin is that of `like`."""
        return graph_edit.emit(self.graph, target, *args, like=like, **kwargs)

    def run(self) -> Program:
        """The placed program."""
        old_nodes = list(self.program.graph.nodes)
        started = False
        for node in old_nodes:
            if node.op != "placeholder" and not started:
                self.strategy.begin(self)
                started = True
            self.values[node] = self._write(node)
        module = module_of(self.program.module, self.graph)
        own = self.strategy.axes
        mesh = (*own, *(axis for axis in self.program.mesh if axis.group not in {one.group for one in own}))
        placed = replace(self.program, module=module, stage=Stage.PLACED, mesh=mesh)
        return placed.with_notes(*self.notes) if self.notes else placed

    def _write(self, node: fx.Node) -> Any:
        rule = self.rules.get(node.target) if node.op == "call_function" else None
        if node.op == "placeholder":
            name = _spelled(self.program.inputs[len(self.values)].name)
            self._names[name] += 1
            new = self.graph.placeholder(name if self._names[name] == 1 else f"{name}_{self._names[name]}")
            node_meta.copy_meta(node, new)
            return new
        if rule is None:
            new = self.graph.node_copy(node, lambda arg: self.values[arg])
            node_meta.copy_meta(node, new)
            return new
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: self.values[arg])
        with torch.no_grad():
            return rule(self, node, args, kwargs)


def _spelled(name: str) -> str:
    """A record's name as a Python name: ``layers_3_mlp_w1``."""
    return re.sub(r"\W", "_", name if not name[:1].isdigit() else f"m_{name}")
