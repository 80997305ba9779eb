"""A scheduled program in pieces: what the host computes before all else, and then by turns what a CUDA graph can hold
and what it cannot.

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
from wholestep.ir.ops import rng_state
from wholestep.ir.ops.packed_scalars import pack
from wholestep.ir.program import Input, InputKind, OutputKind, Program
from wholestep.ir.segment import Segment
from wholestep.lower.cudagraph import rng_replay

FEWEST_CALLS = 4
"""Fewer calls than that run as they are where others are captured: the host is no quicker at launching a graph."""

MOST_GRAPHS = 16
"""More are not made of a step, since a capture takes a while: the shortest of them run as they are."""

NOTHING: Mapping[Any, str] = MappingProxyType({})

_GROUPED = torch.ops.aten._grouped_mm.default
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some calls of a step, one behind the other. Values that pieces hand to each other have numbers."""

    program: Program
    captured: bool
    """Whether it is for a CUDA graph."""
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    drops: tuple[int, ...]
    """Values that nobody reads behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A scheduled program in parts: the host's, and the pieces behind it."""

    host: Program
    """Takes all inputs; gives what the pieces need of the host, then the results that are the host's."""
    pieces: tuple[Piece, ...]
    inputs: tuple[int, ...]
    """The inputs that pieces take, by their number: they are the first values."""
    num_handed: int
    """How many values the host gives the pieces: the next ones."""
    num_values: int
    places: tuple[tuple[bool, int], ...]
    """Per result: whether it is a value of the pieces with this number, or that of the host's results behind those
    that are handed on."""
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
    host = _host_nodes(program.graph)
    cuts = _cuts(program.graph, host, refused)
    reason = _outer_reason(program) or _changed_order(program, host)
    if reason is not None:
        return reason
    runs = _runs(program.graph, host, cuts)
    if cuts and not any(captured for captured, _ in runs):
        return next(iter(cuts.values()))
    return _parts(program, host, runs, tuple(cuts.values()))


def _host_nodes(graph: fx.Graph) -> dict[fx.Node, None]:
    """Calls that take nothing of a device, in order. The last of such a chain may give a tensor to a device."""
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if _handles_gpu_generator(node):
            continue
        if all(_is_host(arg, found) for arg in node.all_input_nodes) and (node.all_input_nodes or _is_made_here(node)):
            found[node] = None
    return found


def _is_made_here(node: fx.Node) -> bool:
    """Whether a call that takes no values is the host's: it packs constants, or makes a tensor on the CPU."""
    on_cpu = not _on_gpu(node) and not op_info.needs_peers(node.target)
    return node.target is pack or on_cpu


def _is_host(node: fx.Node, host: Collection[fx.Node]) -> bool:
    if node.op == "call_function" and node not in host:
        return False
    return not _on_gpu(node)


def _on_gpu(node: fx.Node) -> bool:
    return any(one.is_cuda for one in node_meta.tensors(node))


# ---- what cannot be captured -----------------------------------------------------------------------------------------


def _cuts(graph: fx.Graph, host: Collection[fx.Node], refused: Mapping[Any, str]) -> dict[fx.Node, str]:
    """The calls that no graph can hold, with the reasons, in order."""
    cuts: dict[fx.Node, str] = {}
    rewinding: dict[fx.Node, int] = {}
    """With the number of cuts in front."""
    for node in graph.nodes:
        if node.target in refused and node not in host:
            cuts[node] = f"{_named(node)} could not be captured: {refused[node.target]}"
        elif (reason := _reason(node, host)) is not None:
            cuts[node] = reason
        elif rng_replay.is_replayed(node):
            rewinding[node] = len(cuts)
    if len(set(rewinding.values())) > 1:
        # A graph sets the generator to what it has read itself.
        cuts |= {node: _of_generator(node) for node in rewinding}
    return {node: cuts[node] for node in graph.nodes if node in cuts}


def _reason(node: fx.Node, host: Collection[fx.Node]) -> str | None:
    """Why a CUDA graph cannot hold a call; None if it can, or need not."""
    name = _named(node)
    if rng_replay.is_replayed(node) and rng_replay.is_supported():
        return None
    if _handles_generator(node) and node not in host:
        return _of_generator(node)
    if node.op != "call_function" or node in host:
        return None
    if node.target is _GROUPED and node_meta.tensor(node).dtype is not torch.bfloat16:
        return f"{name} asks the GPU where groups end, as ATen does for all but bfloat16"
    if isinstance(node_meta.value(node), _NUMBERS):
        return f"{name} gives a number of the GPU, for which the host would wait"
    if not all(isinstance(size, int) for one in node_meta.tensors(node) for size in one.shape):
        return f"the size of what {name} gives depends on data"
    if any(not one.is_cuda for one in node_meta.tensors(node)):
        return f"{name} gives a tensor on the CPU that depends on the GPU"
    for arg in node.all_input_nodes:
        if arg.op != "get_attr" and not _on_gpu(arg) and not _is_of_generator(arg):
            whose = "which the host computes for every call" if _is_early(arg, host) else "for which the host waits"
            return f"{name} takes {arg.name}, {whose}"
        if not all(isinstance(size, int) for one in node_meta.tensors(arg) for size in one.shape):
            return f"the size of what {name} takes depends on data"
    return None


def _named(node: fx.Node) -> str:
    """A call for people: what is called, and where."""
    where = node_meta.origin(node).source
    called = node.target if op_info.is_op(node) else getattr(node.target, "__name__", node.target)
    return f"{called}{f' of {where}' if where else ''}"


def _of_generator(node: fx.Node) -> str:
    return f"{_named(node)} reads or sets the state of a random generator on the host"


def _is_early(node: fx.Node, host: Collection[fx.Node]) -> bool:
    return node in host or node.op == "placeholder"


def _handles_generator(node: fx.Node) -> bool:
    """Whether the call reads or sets the state of a generator, of the device that its last argument names."""
    return op_info.is_op(node) and node.target._schema.name.startswith("wholestep::rng_")  # type: ignore[union-attr]


def _handles_gpu_generator(node: fx.Node) -> bool:
    return _handles_generator(node) and str(node.args[-1]).startswith("cuda")


def _is_of_generator(node: fx.Node) -> bool:
    return node.target is rng_state.GET and rng_replay.is_replayed(node)


def _outer_reason(program: Program) -> str | None:
    for output in program.outputs:
        if output.kind is OutputKind.STATE:
            return f"the step creates the state {output.name}; the calls behind it can be captured"
    resizes = any(node.target in (op_info.RESIZE_STORAGE, op_info.RESIZE_STORAGE_) for node in program.graph.nodes)
    if resizes or any(record.freed for record in program.inputs):
        return "the step frees the memory of its inputs or fills it"
    if any(node.target is op_info.VERSION for node in program.graph.nodes):
        return "the step reads the version of a tensor, and a graph has tensors of its own"
    return None


def _changed_order(program: Program, host: Collection[fx.Node]) -> str | None:
    """Whether the host writes to a tensor of its own on one side, early or in a piece, and looks at it on the other; or
    draws random numbers on both."""
    roots: dict[fx.Node, fx.Node] = {}
    written: dict[bool, set[fx.Node]] = {True: set(), False: set()}
    seen: dict[bool, set[fx.Node]] = {True: set(), False: set()}
    drawing: dict[bool, fx.Node] = {}
    for node in program.graph.nodes:
        if node.op != "call_function":
            roots[node] = node
            continue
        early = node in host
        changed = op_info.argument_nodes(node, op_info.written_by(node.target, node.kwargs))
        shared = changed or op_info.argument_nodes(node, op_info.viewed_args(node.target))
        roots[node] = next((roots[one] for one in shared), node)
        written[early] |= {roots[one] for one in changed if not _on_gpu(one)}
        seen[early] |= {roots[one] for one in node.all_input_nodes if not _on_gpu(one)}
        if op_info.draws(node) and not _on_gpu(node) and not _handles_gpu_generator(node):
            drawing[early] = node
    both = (written[True] & seen[False]) | (written[False] & seen[True])
    first = next((node for node in roots if node in both), None)
    if first is not None:
        return f"{first.name} is written on the host beside calls that wait for the GPU"
    if len(drawing) > 1:
        return f"{_named(drawing[False])} draws on the host what depends on the GPU, and other calls draw there, too"
    return None


# ---- pieces ----------------------------------------------------------------------------------------------------------

Run = tuple[bool, list[fx.Node]]
"""Calls one behind the other, and whether a graph holds them."""


def _runs(graph: fx.Graph, host: Collection[fx.Node], cuts: Collection[fx.Node]) -> list[Run]:
    """The calls that are not the host's, by turns for graphs and not."""
    calls = [node for node in graph.nodes if node.op == "call_function" and node not in host]
    turns = [(not cut, list(nodes)) for cut, nodes in groupby(calls, cuts.__contains__)]
    if len(turns) > 1:
        sizes = [sum(map(_num_calls, nodes)) if captured else 0 for captured, nodes in turns]
        worth = sorted((n for n, size in enumerate(sizes) if size >= FEWEST_CALLS), key=lambda n: -sizes[n])
        turns = [(number in worth[:MOST_GRAPHS], nodes) for number, (_, nodes) in enumerate(turns)]
    runs = [
        (captured, [node for _, nodes in some for node in nodes])
        for captured, some in groupby(turns, lambda turn: turn[0])
    ]
    number_of = {node: number for number, (_, nodes) in enumerate(runs) for node in nodes}
    for node in calls:
        if node.target in (op_info.WAIT, operator.getitem):
            begun = number_of.get(node.args[0])
            if begun is not None and begun != number_of[node]:
                runs[number_of[node]][1].remove(node)
                runs[begun][1].append(node)
                number_of[node] = begun
    return [run for run in runs if run[1]]


def _num_calls(node: fx.Node) -> int:
    """How many calls a node stands for that compute something."""
    if isinstance(node.target, Segment):
        return sum(map(_num_calls, node.target.calls))
    idle = node.target in (op_info.WAIT, operator.getitem) or op_info.is_view(node) or rng_replay.is_replayed(node)
    return int(not idle)


def _parts(program: Program, host: Collection[fx.Node], runs: Sequence[Run], cuts: tuple[str, ...]) -> Partition:
    results = program.results
    taken = {arg for _, nodes in runs for node in nodes for arg in node.all_input_nodes}
    wanted = {value for value in results if isinstance(value, fx.Node)}
    inputs = [n for n, node in enumerate(program.placeholders) if node in taken or _on_gpu(node)]
    handed = [node for node in host if node in taken or _on_gpu(node)]
    values = {program.placeholders[number]: place for place, number in enumerate(inputs)}
    for node in handed:
        values[node] = len(values)
    pieces = []
    for number, (captured, nodes) in enumerate(runs):
        read = {arg for node in nodes for arg in node.all_input_nodes}
        later = {arg for _, others in runs[number + 1 :] for node in others for arg in node.all_input_nodes} | wanted
        takes, gives = [node for node in values if node in read], [node for node in nodes if node in later]
        for node in gives:
            values[node] = len(values)
        drops = [values[node] for node in takes if node not in later and node.op == "call_function"]
        part = _part(program, gives, keep=set(nodes).__contains__, takes=takes)
        pieces.append(Piece(
            program=part, captured=captured, takes=tuple(values[node] for node in takes),
            gives=tuple(values[node] for node in gives), drops=tuple(drops),
        ))  # fmt: skip
    at_home = [value for value in results if value not in values]
    home = _part(program, [*handed, *at_home], keep=lambda node: node in host)
    places, behind = [], iter(range(len(at_home)))
    for value in results:
        places.append((True, values[value]) if value in values else (False, next(behind)))
    return Partition(
        host=home, pieces=tuple(pieces), inputs=tuple(inputs), num_handed=len(handed), num_values=len(values),
        places=tuple(places), cuts=cuts,
        on_host=frozenset(place for node, place in values.items() if not _on_gpu(node)),
    )  # fmt: skip


def _part(
    program: Program, results: Sequence[Any], *, keep: Callable[[fx.Node], bool], takes: Sequence[fx.Node] | None = None
) -> Program:
    """A program of some of the nodes. `takes` are its inputs; None: those of the whole."""
    records = dict(zip(program.placeholders, program.inputs, strict=True))
    inputs = program.placeholders if takes is None else takes
    graph = fx.Graph()
    inside: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        inside[node] = graph.placeholder(node.name)
        node_meta.copy_meta(node, inside[node])
    for node in program.graph.nodes:
        if node.op == "get_attr" or (node.op == "call_function" and keep(node)):
            inside[node] = graph.node_copy(node, inside.__getitem__)
    graph.output(tuple(inside[value] if isinstance(value, fx.Node) else value for value in results))
    graph_edit.remove_dead_code(graph)
    return replace(
        program, module=module_of(program.module, graph), outputs=(),
        inputs=tuple(records.get(node) or _handed_record(node) for node in inputs),
    )  # fmt: skip


def _handed_record(node: fx.Node) -> Input:
    found = list(node_meta.tensors(node))
    shape, dtype = (tuple(found[0].shape), found[0].dtype) if found else ((), torch.float64)
    return Input(kind=InputKind.TENSOR, name=node.name, shape=shape, dtype=dtype)
