"""Calls that may fail, that write to an input and that read one: what orders the writes.

A call that may fail is a *fence*: an input must not be written before the last one, since an error leaves all inputs as
they were. See `passes/schedule/sink_updates.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.fx as fx

from wholestep.ir import graph_edit, op_info
from wholestep.ir.program import InputKind, OutputKind, Program


def fences(graph: fx.Graph, *, peers: bool) -> list[fx.Node]:
    """Calls that may fail, in order.

    Those are calls that may refuse values and, if `peers`, starts and waits of collectives.
    """
    calls = (node for node in graph.nodes if node.op == "call_function" and op_info.may_fail(node.target))
    return [node for node in calls if peers or not op_info.needs_peers(node.target)]


def writes_during_communication(program: Program) -> bool:
    """Whether a scheduled program writes to an input before its last collective is over."""
    inputs = set(program.placeholders)
    written = False
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        if written and op_info.needs_peers(node.target):
            return True
        if not inputs.isdisjoint(_nodes(node, op_info.viewed_args(node.target))):
            inputs.add(node)
        written |= not inputs.isdisjoint(_nodes(node, op_info.written_by(node.target, node.kwargs)))
    return False


def arguments(program: Program) -> set[fx.Node]:
    """The inputs that are arguments of the call, and their views."""
    nodes = {n for n, record in zip(program.placeholders, program.inputs, strict=True) if record.kind is InputKind.USER}
    for node in program.graph.nodes:
        if node.op == "call_function" and not nodes.isdisjoint(_nodes(node, op_info.viewed_args(node.target))):
            nodes.add(node)
    return nodes


def frees(value: Any, tensors: set[fx.Node]) -> bool:
    """Whether the value is a call that gives up the memory of one of `tensors`."""
    return isinstance(value, fx.Node) and op_info.frees_storage(value) and value.args[0] in tensors


def updates(program: Program) -> dict[fx.Node, list[fx.Node]]:
    """Calls that could write to an input with a WRITE output, each with those inputs."""
    own = arguments(program)
    ends = zip(program.outputs, program.results, strict=True)
    targets = {end.target for end, value in ends if end.kind is OutputKind.WRITE and not frees(value, own)}
    base = {node: node for index, node in enumerate(program.placeholders) if index in targets}
    written_inputs: dict[fx.Node, list[fx.Node]] = {}
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        viewed = [arg for arg in _nodes(node, op_info.viewed_args(node.target)) if arg in base]
        if viewed:
            base[node] = base[viewed[0]]
        if frees(node, own):
            continue
        twin = op_info.in_place_variant(node.target)
        written = _nodes(node, op_info.written_by(twin, node.kwargs)) if twin is not None else ()
        bases = [base[arg] for arg in written if arg in base]
        if bases:
            written_inputs[node] = bases
    return written_inputs


def readers(program: Program) -> dict[fx.Node, list[fx.Node]]:
    """For each input that the step writes to, the calls that read it or a view of it; of a collective also its waits,
    until which it reads."""
    targets = {output.target for output in program.outputs if output.kind is OutputKind.WRITE}
    base = {node: node for index, node in enumerate(program.placeholders) if index in targets}
    calls: dict[fx.Node, list[fx.Node]] = {node: [] for node in base}
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        for arg in dict.fromkeys(base[arg] for arg in node.all_input_nodes if arg in base):
            calls[arg] += [node, *op_info.waits(node)] if op_info.is_collective(node) else [node]
        viewed = [arg for arg in _nodes(node, op_info.viewed_args(node.target)) if arg in base]
        if viewed:
            base[node] = base[viewed[0]]
    return calls


def _nodes(node: fx.Node, positions: tuple[int, ...]) -> Iterable[fx.Node]:
    return graph_edit.nodes_of([node.args[i] for i in positions if i < len(node.args)])
