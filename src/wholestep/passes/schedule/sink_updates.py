"""Moves updates of inputs behind the last call that may fail, so that they may write in place.

An input must not be written before the last look-up that may find an index out of range: an error leaves all inputs
as they were. An update that stands before the last such call, a *fence* (a metric is looked up after the optimizer),
is therefore moved behind it, with everything that reads it. What the step does to free the memory of an argument
stays: that is given up even if the step fails later.

Whether collectives are fences too is a choice. They fail when a peer dies, and only then. With them as fences a
step that loses a peer leaves its inputs as they were; without, parameters of one bucket are updated while another one
is under way, and a step that loses a peer in between says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.fx as fx

from wholestep.program import edit, ops
from wholestep.program.program import InputKind, OutputKind, Program


def fences(graph: fx.Graph, *, peers: bool) -> list[fx.Node]:
    """Calls that may fail, in order: what may refuse values and, if `peers`, starts and waits of collectives."""
    calls = (node for node in graph.nodes if node.op == "call_function" and ops.may_fail(node.target))
    return [node for node in calls if peers or not ops.needs_peers(node.target)]


def sink_updates(program: Program, *, peers: bool) -> int:
    """Moves updates behind the last fence, in order. Gives the number of nodes moved.

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


def writes_beside_communication(program: Program) -> bool:
    """Whether a scheduled program writes to an input before its last collective is over."""
    inputs = set(program.placeholders)
    written = False
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        if written and ops.needs_peers(node.target):
            return True
        if not inputs.isdisjoint(_nodes(node, ops.viewed_args(node.target))):
            inputs.add(node)
        written |= not inputs.isdisjoint(_nodes(node, ops.written_by(node.target, node.kwargs)))
    return False


def arguments(program: Program) -> set[fx.Node]:
    """The inputs that are arguments of the call, and their views."""
    found = {n for n, record in zip(program.placeholders, program.inputs, strict=True) if record.kind is InputKind.USER}
    for node in program.graph.nodes:
        if node.op == "call_function" and not found.isdisjoint(_nodes(node, ops.viewed_args(node.target))):
            found.add(node)
    return found


def frees(value: Any, tensors: set[fx.Node]) -> bool:
    """Whether the value is a call that gives up the memory of one of `tensors`."""
    return isinstance(value, fx.Node) and ops.frees_storage(value) and value.args[0] in tensors


def updates(program: Program) -> dict[fx.Node, list[fx.Node]]:
    """Calls that could overwrite an input that has a WRITE output, or a view of one; the inputs of each."""
    own = arguments(program)
    ends = zip(program.outputs, program.results, strict=True)
    targets = {end.target for end, value in ends if end.kind is OutputKind.WRITE and not frees(value, own)}
    base = {node: node for index, node in enumerate(program.placeholders) if index in targets}
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        viewed = [arg for arg in _nodes(node, ops.viewed_args(node.target)) if arg in base]
        if viewed:
            base[node] = base[viewed[0]]
        if frees(node, own):
            continue
        twin = ops.in_place_variant(node.target)
        written = _nodes(node, ops.written_by(twin, node.kwargs)) if twin is not None else ()
        bases = [base[arg] for arg in written if arg in base]
        if bases:
            found[node] = bases
    return found


def readers(program: Program) -> dict[fx.Node, list[fx.Node]]:
    """For each input that the step writes to, the calls that read it or a view of it."""
    targets = {output.target for output in program.outputs if output.kind is OutputKind.WRITE}
    base = {node: node for index, node in enumerate(program.placeholders) if index in targets}
    found: dict[fx.Node, list[fx.Node]] = {node: [] for node in base}
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        for arg in dict.fromkeys(base[arg] for arg in node.all_input_nodes if arg in base):
            found[arg].append(node)
        viewed = [arg for arg in _nodes(node, ops.viewed_args(node.target)) if arg in base]
        if viewed:
            base[node] = base[viewed[0]]
    return found


def _nodes(node: fx.Node, positions: tuple[int, ...]) -> Iterable[fx.Node]:
    return edit.nodes_of([node.args[i] for i in positions if i < len(node.args)])


def _pinned(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that a call which may fail, a random number or an effect depends on, and those themselves."""
    pinned: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        fixed = node.op == "call_function" and (ops.may_fail(node.target) or ops.has_effect(node.target))
        if fixed or any(user in pinned for user in node.users):
            pinned.add(node)
    return pinned
