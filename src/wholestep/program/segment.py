"""Segment: a run of nodes as one call, which a compiler may turn into kernels of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.fx as fx


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """The target of a call node that stands for many. Gives a list of results.

    As it is, a segment runs its nodes one by one; that is what a backend which compiles it is compared with.
    """

    name: str
    module: fx.GraphModule
    """Functional; a placeholder per argument; returns a tuple of tensors, none of them a view of another."""
    stored: tuple[tuple[int, int], ...] = ()
    """(argument, result) pairs: the result is written to the argument's memory, and None stands in its place."""

    @property
    def __name__(self) -> str:  # what the text of a program calls it
        return self.name

    @property
    def graph(self) -> fx.Graph:
        """The nodes."""
        return self.module.graph

    @property
    def calls(self) -> Iterator[fx.Node]:
        """The nodes that do something, in order."""
        return (node for node in self.graph.nodes if node.op == "call_function")

    def __call__(self, arguments: list[Any]) -> list[Any]:
        """Runs the nodes in order. Results that are stored are written behind the last of them.

        Takes the arguments of its node as one list and empties it, so that what nobody else holds is freed behind its
        last reader inside.
        """
        targets = {result: arguments[argument] for argument, result in self.stored}
        results = list(fx.Interpreter(self.module).boxed_run(arguments))
        for place, target in targets.items():
            target.copy_(results[place])
            results[place] = None
        return results
