"""Numbers of the GPU that the host reads in the middle of a step are read together.

Adafactor asks for the norm of every gradient, computes a rate of it and updates the parameter by that: two parameters
have nothing to do with each other, and yet the host waits for the GPU at each. Before and after::

    norm_0 = item(norm(g_0))                  a = norm(g_0);  b = norm(g_1);  read = cpu(stack([a, b]))
    update(w_0, 1 / norm_0)            ->     norm_0, norm_1 = items of read
    norm_1 = item(norm(g_1))                  packed = pack([1 / norm_0, 1 / norm_1], device)
    update(w_1, 1 / norm_1)                   update(w_0, element(packed, 0));  update(w_1, element(packed, 1))

A round is what the device computes until it needs a number that the host has made of an earlier round, and then what
the host makes of it. The numbers travel back as those do that are known before a step
(`passes/schedule/pack_scalars.py`).
"""

from __future__ import annotations

import torch
import torch.fx as fx

from wholestep.ir import graph_edit, node_meta, op_info
from wholestep.ir.program import Program, Stage
from wholestep.passes.schedule.pack_scalars import is_of_host, known_at_start

FEWEST_READS = 4
"""Steps that wait for the GPU less often are left as they are."""

_ITEM = torch.ops.aten._local_scalar_dense.default

Place = tuple[int, bool]
"""A round, and whether a call is the host's in it."""


def batch_host_reads(program: Program) -> Program:
    """The program with as few turns of GPU and host as its numbers need.

    Calls with effects, draws and collectives keep their order among each other.
    """
    if program.stage is Stage.SCHEDULED:
        return program
    places = _places(program.graph)
    before, after = _turns([*places.values()]), _turns(sorted(places.values()))
    if before < FEWEST_READS or after >= before:
        return program
    end = program.graph.output_node()
    for node in sorted(places, key=places.__getitem__):
        end.prepend(node)
    num_reads = _read_at_once(program.graph, places)
    return program.with_notes(f"the host reads {num_reads} numbers of the GPU in {after} rounds, and not in {before}")


def _places(graph: fx.Graph) -> dict[fx.Node, Place]:
    """Where every call can stand at the earliest, in the order of the graph. What takes no number of the GPU, made by
    the host, is in round 0."""
    early = known_at_start(graph)
    places: dict[fx.Node, Place] = {}
    last: Place = (0, False)
    for node in graph.nodes:
        if node.op != "call_function" or node in early:
            continue
        behind = [places[arg] for arg in node.all_input_nodes if arg in places]
        keeps_order = op_info.has_effect(node.target) or op_info.needs_peers(node.target)
        found = max([(0, False), *behind, *([last] if keeps_order else [])])
        if is_of_host(node):
            found = found[0], True
        elif found[1]:
            found = found[0] + 1, False
        places[node] = found
        if keeps_order:
            last = found
    return places


def _turns(places: list[Place]) -> int:
    """How often the host's turn comes."""
    return sum(now[1] and not before[1] for before, now in zip([(0, False), *places], places, strict=False))


def _read_at_once(graph: fx.Graph, places: dict[fx.Node, Place]) -> int:
    """Has the numbers that are read in a round travel in one tensor for each type. How many they are."""
    reads: dict[tuple[int, torch.dtype], list[fx.Node]] = {}
    for node, (number, _) in places.items():
        source = node.args[0] if node.target is _ITEM else None
        if isinstance(source, fx.Node) and node_meta.tensor(source).is_cuda:
            reads.setdefault((number, node_meta.tensor(source).dtype), []).append(node)
    for nodes in reads.values():
        if len(nodes) > 1:
            _stacked(graph, nodes)
    return sum(map(len, reads.values()))


def _stacked(graph: fx.Graph, reads: list[fx.Node]) -> None:
    aten, origin = torch.ops.aten, node_meta.origin(reads[0])
    with graph.inserting_before(reads[0]):
        flat = [graph_edit.emit(graph, aten.view.default, read.args[0], [1]) for read in reads]
        together = graph_edit.emit(graph, aten.cat.default, flat)
        at_home = graph_edit.emit(graph, aten._to_copy.default, together, device=torch.device("cpu"))
        for place, read in enumerate(reads):
            one = graph_edit.emit(graph, aten.select.int, at_home, 0, place)
            read.args = (one,)
            node_meta.set_origin(one, node_meta.origin(read))
    for node in (*flat, together, at_home):
        node_meta.set_origin(node, origin)
