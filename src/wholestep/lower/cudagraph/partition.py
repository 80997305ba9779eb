"""A scheduled program in pieces: first the host's calls, then by turns what a CUDA graph can hold and what it cannot.

Most steps are one graph. A call that the host has to wait for (``loss.item()``, a check of values, a size that is
data) cuts it: what stands between two such calls is a graph of its own, the longest that there is.

Note: order
    Pieces keep the order of the program. Only waits of collectives move, into the piece that begins what they wait for,
    since a graph can wait for nothing that was begun outside of it; and items of lists, which stay with their list.

Note: what the host computes early
    Calls that take nothing of the device run before the first piece. They may not write to what a call within a piece
    reads, nor the other way round, since these have changed their order: such steps have no graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType
from typing import Any

import torch
import torch.fx as fx

from wholestep.ir import graph_edit, node_meta, op_info
from wholestep.ir.lazy_graph_module import module_of
from wholestep.ir.program import Input, InputKind, Program
from wholestep.ir.segment import Segment
from wholestep.lower.cudagraph import rng_replay
from wholestep.lower.cudagraph.capture_reasons import host_nodes, on_gpu, uncapturable_calls, why_not_step

FEWEST_CALLS = 4
"""Fewer calls than that run as they are where others are captured: the host is no quicker at launching a graph."""

MOST_GRAPHS = 16
"""More are not made of a step, since a capture takes a while: the shortest of them run as they are."""

NOTHING: Mapping[Any, str] = MappingProxyType({})

_NOTHING_TO_LAUNCH = "it launches nothing on the GPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Consecutive calls of a step. Values that pieces hand to each other have numbers."""

    program: Program
    captured: bool
    """Whether it is for a CUDA graph."""
    inputs: tuple[int, ...]
    """Values that it reads."""
    outputs: tuple[int, ...]
    """Values that it computes for later pieces, or as results."""
    frees: tuple[int, ...]
    """Values that nobody reads after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A scheduled program in parts: the host's, and the pieces that run after it."""

    host: Program
    """Takes all inputs; gives what the pieces need of the host, then the results that are the host's."""
    pieces: tuple[Piece, ...]
    inputs: tuple[int, ...]
    """The inputs that pieces take, by their number: they are the first values."""
    num_host_values: int
    """How many values the host gives the pieces: the next ones."""
    num_values: int
    result_places: tuple[tuple[bool, int], ...]
    """Per result: whether it is a value of the pieces with this number, or that of the host's own results."""
    on_host: frozenset[int]
    """Values that are numbers, or tensors on the CPU."""
    cuts: tuple[str, ...]
    """Why calls are in no graph, those that had to be first. Empty for a step that is one graph."""

    @property
    def description(self) -> str:
        """How many graphs there are and, if calls stand outside of them, why, for people."""
        number = sum(piece.captured for piece in self.pieces)
        graphs = "one CUDA graph" if number == 1 else f"{number} CUDA graphs"
        more = f", and {len(self.cuts) - 1} more" if len(self.cuts) > 1 else ""
        return f"{graphs}, cut where {self.cuts[0]}{more}" if self.cuts else graphs


def partition(program: Program, refused: Mapping[Any, str] = NOTHING) -> Partition | str:
    """The parts of a scheduled program, or the reason why nothing of it can be captured. `refused`: targets of calls
    that turned out to be none for a graph, with what was said."""
    host = host_nodes(program.graph)
    cuts = uncapturable_calls(program, host, refused)
    reason = why_not_step(program, host)
    if reason is not None:
        return reason
    runs = _runs(program.graph, host, cuts)
    if not any(run.captured for run in runs):
        return next(iter(cuts.values()), _NOTHING_TO_LAUNCH)
    live = liveness(program, host, runs)
    own = [value for value in program.results if value not in live.values]
    own_places = iter(range(len(own)))
    return Partition(
        host=extract(program, [*live.host_values, *own], keep=host.__contains__),
        pieces=tuple(
            Piece(
                program=extract(program, outputs, keep=set(run.nodes).__contains__, inputs=inputs),
                captured=run.captured, inputs=live.numbers(inputs), outputs=live.numbers(outputs),
                frees=live.numbers(frees),
            )
            for run, inputs, outputs, frees in zip(runs, live.inputs, live.outputs, live.frees, strict=True)
        ),
        inputs=live.step_inputs, num_host_values=len(live.host_values), num_values=len(live.values),
        result_places=tuple(
            (True, live.values[one]) if one in live.values else (False, next(own_places)) for one in program.results
        ),
        on_host=frozenset(number for node, number in live.values.items() if not on_gpu(node)),
        cuts=tuple(cuts.values()),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive calls that become one piece."""

    captured: bool
    """Whether a graph holds them."""
    nodes: list[fx.Node]


def _runs(graph: fx.Graph, host: Collection[fx.Node], cuts: Collection[fx.Node]) -> list[Run]:
    """The calls that are not the host's, by turns for graphs and not."""
    calls = [node for node in graph.nodes if node.op == "call_function" and node not in host]
    turns = [(not cut, list(nodes)) for cut, nodes in groupby(calls, cuts.__contains__)]
    fewest = FEWEST_CALLS if len(turns) > 1 else 1
    sizes = [sum(map(_num_calls, nodes)) if captured else 0 for captured, nodes in turns]
    worth = sorted((n for n, size in enumerate(sizes) if size >= fewest), key=lambda n: -sizes[n])
    turns = [(number in worth[:MOST_GRAPHS], nodes) for number, (_, nodes) in enumerate(turns)]
    runs = [
        Run(captured, [node for _, nodes in some for node in nodes])
        for captured, some in groupby(turns, lambda turn: turn[0])
    ]
    run_of = {node: run for run in runs for node in run.nodes}
    for node in calls:
        if node.target in (op_info.WAIT, operator.getitem):
            begun = run_of.get(node.args[0])
            if begun is not None and begun is not run_of[node]:
                run_of[node].nodes.remove(node)
                begun.nodes.append(node)
                run_of[node] = begun
    return [run for run in runs if run.nodes]


def _num_calls(node: fx.Node) -> int:
    """How many calls a node stands for that compute something."""
    if isinstance(node.target, Segment):
        return sum(map(_num_calls, node.target.calls))
    idle = node.target in (op_info.WAIT, operator.getitem) or op_info.is_view(node) or rng_replay.is_replayed(node)
    return int(not idle)


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """Which values pieces share, and which of them each piece reads, computes and is the last to read."""

    values: dict[fx.Node, int]
    """With their numbers: inputs of the step, values of the host, then outputs of pieces."""
    step_inputs: tuple[int, ...]
    """The inputs of the step among them, by their number in the program."""
    host_values: list[fx.Node]
    inputs: list[list[fx.Node]]
    """Per piece, as the next two."""
    outputs: list[list[fx.Node]]
    frees: list[list[fx.Node]]

    def numbers(self, nodes: Sequence[fx.Node]) -> tuple[int, ...]:
        """The numbers of some values."""
        return tuple(self.values[node] for node in nodes)


def liveness(program: Program, host: Collection[fx.Node], runs: Sequence[Run]) -> Liveness:
    """Numbers the values that pieces share, and finds who reads them."""
    reads = [{arg for node in run.nodes for arg in node.all_input_nodes} for run in runs]
    read = {arg for one in reads for arg in one}
    results = {value for value in program.results if isinstance(value, fx.Node)}
    step_inputs = [n for n, node in enumerate(program.placeholders) if node in read or on_gpu(node)]
    host_values = [node for node in host if node in read or on_gpu(node)]
    values = {program.placeholders[number]: place for place, number in enumerate(step_inputs)}
    values |= {node: place for place, node in enumerate(host_values, len(values))}
    inputs, outputs, frees = [], [], []
    for number, run in enumerate(runs):
        later = results.union(*reads[number + 1 :])
        inputs.append([node for node in values if node in reads[number]])
        outputs.append([node for node in run.nodes if node in later])
        frees.append([node for node in inputs[-1] if node not in later and node.op == "call_function"])
        values |= {node: place for place, node in enumerate(outputs[-1], len(values))}
    return Liveness(
        values=values, step_inputs=tuple(step_inputs), host_values=host_values,
        inputs=inputs, outputs=outputs, frees=frees,
    )  # fmt: skip


def extract(
    program: Program,
    results: Sequence[Any],
    *,
    keep: Callable[[fx.Node], bool],
    inputs: Sequence[fx.Node] | None = None,
) -> Program:
    """A program of some of the nodes, with some values as `inputs`; None: the inputs of the whole."""
    records = dict(zip(program.placeholders, program.inputs, strict=True))
    placeholders = program.placeholders if inputs is None else inputs
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in placeholders:
        copies[node] = graph.placeholder(node.name)
        node_meta.copy_meta(node, copies[node])
    for node in program.graph.nodes:
        if node.op == "get_attr" or (node.op == "call_function" and keep(node)):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[value] if isinstance(value, fx.Node) else value for value in results))
    graph_edit.remove_dead_code(graph)
    return replace(
        program, module=module_of(program.module, graph), outputs=(),
        inputs=tuple(records.get(node) or _value_record(node) for node in placeholders),
    )  # fmt: skip


def _value_record(node: fx.Node) -> Input:
    """The record of a value that comes from another part."""
    tensors = list(node_meta.tensors(node))
    shape, dtype = (tuple(tensors[0].shape), tensors[0].dtype) if tensors else ((), torch.float64)
    return Input(kind=InputKind.TENSOR, name=node.name, shape=shape, dtype=dtype)
