"""Moves updates of inputs after the last call that may fail, so that they run in place.

An input must not be written before the last look-up that may find an index out of range: an error leaves all inputs
as they were. An update that stands before the last such call, a *fence* (a metric is looked up after the optimizer),
is therefore moved after it, with everything that reads it. What the step does to free the memory of an argument
stays: that is given up even if the step fails later.

Whether collectives are fences too is a choice. They fail when a peer dies, and only then. With them as fences a
step that loses a peer leaves its inputs as they were; without, parameters of one bucket are updated while another one
is under way, and a step that loses a peer in between says so.
"""

from __future__ import annotations

import torch.fx as fx

from wholestep.ir import op_info
from wholestep.ir.program import Program
from wholestep.passes.analysis.write_order import fences, updates


def sink_updates(program: Program, *, peers: bool) -> int:
    """Moves updates after the last fence, in order. Gives the number of nodes moved.

    What a fence, a random number or an effect depends on stays where it is.
    """
    stops = fences(program.graph, peers=peers)
    if not stops:
        return 0
    pinned = _pinned(program.graph)
    moving = {node for node in updates(program) if node not in pinned}
    before = list(program.graph.nodes)
    before = before[: before.index(stops[-1])]
    anchor, num_moved = stops[-1], 0
    for node in before:
        if node in moving or any(arg in moving for arg in node.all_input_nodes):
            moving.add(node)
            anchor.append(node)
            anchor = node
            num_moved += 1
    return num_moved


def _pinned(graph: fx.Graph) -> set[fx.Node]:
    """Calls that may fail, draw or have effects, and what those depend on."""
    pinned: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        fixed = node.op == "call_function" and (op_info.may_fail(node.target) or op_info.has_effect(node.target))
        if fixed or any(user in pinned for user in node.users):
            pinned.add(node)
    return pinned
