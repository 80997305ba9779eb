"""Segment: a run of nodes as one call, which a compiler may turn into kernels of its own."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from wholestep.ir import node_meta
from wholestep.ir.program import Program
from wholestep.ir.sizes import numbers_of, renamed, symbols_of

Compiled = Callable[[list[Any]], Sequence[Any]]
"""What does the same as a segment: takes a list, which it empties, and gives a list."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """The target of a call node that stands for many. Gives a list of results.

    As it is, a segment runs its nodes one by one; that is what a backend which compiles it is compared with.
    """

    name: str
    read: Callable[[], fx.GraphModule]
    """Gives `module`, always the same. A process that runs what another one has compiled asks few segments for it."""
    told: str = ""
    """What `read` gives does, as `likeness` says it; empty where that is found out when it is asked for."""
    told_sizes: tuple[Any, ...] = ()
    """`sizes`, where `told` is not empty."""
    stored: tuple[tuple[int, int], ...] = ()
    """(argument, result) pairs: the result is written to the argument's memory, and None stands in its place."""

    def __repr__(self) -> str:
        return self.name

    @property
    def module(self) -> fx.GraphModule:
        """Functional; a placeholder per argument; returns a tuple of tensors, none of them a view of another."""
        return self.read()

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

    @property
    def likeness(self) -> str:
        """The same text for segments that do the same with arguments of the same layout, wherever they stand."""
        return f"{self.does}\n{self.stored}"

    @functools.cached_property
    def does(self) -> str:
        """`likeness` without what is stored."""
        if self.told:
            return self.told
        numbers = {node: number for number, node in enumerate(self.graph.nodes)}
        names = {symbol: f"n{number}" for number, symbol in enumerate(self.symbols)}
        return "\n".join(_line(node, numbers, names) for node in numbers)

    @functools.cached_property
    def symbols(self) -> tuple[Any, ...]:
        """The symbols in the sizes of its arguments, in order of appearance; none where all sizes are constants.

        Segments that are alike have as many, which stand for the same in each.
        """
        return tuple(one.node.expr for one in self.sizes)

    @functools.cached_property
    def sizes(self) -> tuple[torch.SymInt, ...]:
        """The numbers that these symbols are."""
        if self.told:
            return self.told_sizes
        arguments = self.graph.find_nodes(op="placeholder")
        numbers = [number for node in arguments for number in numbers_of(node_meta.value(node))]
        shapes: Any = next((one.node.shape_env for one in numbers if isinstance(one, torch.SymInt)), None)
        return tuple(shapes.create_symintnode(one, hint=shapes.size_of[one].hint) for one in symbols_of(numbers))

    def __call__(self, arguments: list[Any]) -> list[Any]:
        """Runs the nodes in order. Results that are stored are written after the last of them.

        Takes the arguments of its node as one list and empties it, so that what nobody else holds is freed after its
        last reader inside.
        """
        targets = {result: arguments[argument] for argument, result in self.stored}
        results = list(fx.Interpreter(self.module).boxed_run(arguments))
        for place, target in targets.items():
            target.copy_(results[place])
            results[place] = None
        return results


def _line(node: fx.Node, numbers: Mapping[fx.Node, int], names: Mapping[Any, str]) -> str:
    """What a node does, and the layout of what it gives. Constants of the program are arguments of its segments.

    Symbols of sizes have the names that are given. An argument that is a size is known by its expression.
    """
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: _Name(f"%{numbers[arg]}"))
    target = "" if node.op in ("placeholder", "output") else _told(node.target)

    def told(sizes: Iterable[Any]) -> tuple[int | str, ...]:
        return tuple(renamed(one, names) for one in sizes)

    layouts = [
        (one.dtype, told(one.shape), told(one.stride()), *told([one.storage_offset()]), one.device)
        for one in node_meta.tensors(node)
    ]
    value = node_meta.value(node)
    size = f" {renamed(value, names)}" if isinstance(value, torch.SymInt) else ""
    return f"{node.op} {target} {args} {kwargs} {layouts}{size}"


def _told(target: Any) -> str:
    """A target as the same text in every process: a function that can be found by its name is that name."""
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", "")
    is_found = isinstance(target, types.FunctionType) and getattr(sys.modules.get(module or ""), name, None) is target
    return f"{module}.{name}" if is_found else str(target)


class _Name(str):
    """Text that stands for itself."""

    __slots__ = ()
    __repr__ = str.__str__


def segments_of(program: Program) -> list[Segment]:
    """The segments of a program, in order."""
    return [node.target for node in program.graph.nodes if isinstance(node.target, Segment)]
