"""Hoists arithmetic of the host, and sends its results to the device in one tensor.

Rates, bias corrections and step counters are Python numbers in the graph. A compiler of kernels would freeze them, and
so would a CUDA graph. Before and after::

    pow = beta ** step                        pow = beta ** step
    rate = lr / (1 - pow)                     rate = lr / (1 - pow)
    ... forward, backward ...          ->     packed = pack([rate, decay], device)
    mul = aten.mul(w, decay)                  ... forward, backward ...
    addcdiv = aten.addcdiv(mul, m, d, rate)   mul = aten.mul(w, element(packed, 1))
                                              addcdiv = aten.addcdiv(mul, m, d, element(packed, 0))

Numbers that the host makes of what a GPU has computed travel there in the same way, after the last of them.

What reads `element` gets a tensor of no dimensions from a backend that compiles it
(`lower/decompositions/tensor_scalars.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.fx as fx

from wholestep.ir import graph_edit, node_meta, op_info, size_nodes
from wholestep.ir.ops.packed_scalars import element, pack
from wholestep.ir.program import Program, Stage


def pack_scalars(program: Program, *, reads: Callable[[fx.Node], bool]) -> Program:
    """The program with numbers of the host in one packed tensor, made before all else.

    `reads` says of a call with numbers among its arguments whether it can take them from there; others keep them. What
    the host makes of numbers of a GPU travels back to it in the same way, after the host's turn. A number that depends
    on what another device or a peer computes stays where it is. The note says how many travel.
    """
    if program.stage is Stage.SCHEDULED:
        return program
    graph = program.graph
    early = known_at_start(graph)
    turns = _turns(graph, early)
    known = {False: early, True: early.union(turns)}
    needed: dict[_Group, dict[fx.Node, int]] = {}
    taken: list[tuple[fx.Node, dict[fx.Node, _Group]]] = []
    for node in graph.nodes:
        if node.op == "call_function" and node not in early and reads(node):
            device = next(node_meta.tensors(node)).device
            numbers = [arg for arg in node.all_input_nodes if is_number(arg)]
            if numbers and known[device.type == "cuda"].issuperset(numbers):
                groups = {number: (turns.get(number, 0), device) for number in numbers}
                taken.append((node, groups))
                for number, group in groups.items():
                    places = needed.setdefault(group, {})
                    places.setdefault(number, len(places))
    if not taken:
        return program
    _hoist(graph, {number for places in needed.values() for number in places if number in early})
    packs = {group: _pack(graph, list(places), group[1]) for group, places in needed.items()}
    for node, groups in taken:
        with graph.inserting_before(node):
            for number, group in groups.items():
                read = graph.call_function(element, (packs[group], needed[group][number]))
                node_meta.copy_meta(number, read)
                node.replace_input_with(number, read)
    count = sum(map(len, needed.values()))
    return program.with_notes(f"{count} numbers of the host travel packed, for {len(taken)} calls")


_Group = tuple[int, torch.device]
"""The turn of the host in which numbers are made, and the device that needs them."""


def _turns(graph: fx.Graph, early: set[fx.Node]) -> dict[fx.Node, int]:
    """By call of the host after the first turn, its turn: no call of a GPU stands within one."""
    turns: dict[fx.Node, int] = {}
    turn, is_over = 0, True
    for node in graph.nodes:
        if node.op != "call_function" or node in early:
            continue
        if is_of_host(node):
            turn += is_over
            turns[node] = turn
        is_over = not is_of_host(node)
    return turns


def is_of_host(node: fx.Node) -> bool:
    """Whether a call computes something for the host and has no effect."""
    if op_info.has_effect(node.target) or op_info.needs_peers(node.target) or node.target is op_info.VERSION:
        return False
    on_gpu = any(one.is_cuda for one in node_meta.tensors(node))
    return not on_gpu and bool(node.all_input_nodes) and node_meta.value(node) is not None


def is_number(node: fx.Node) -> bool:
    """Whether the node gives a floating-point number of the host."""
    return isinstance(node_meta.value(node), (float, torch.SymFloat))


def known_at_start(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that depend on inputs of the host alone, so that they are known at the start."""
    known: set[fx.Node] = set()
    for node in graph.nodes:
        on_host = all(one.device.type == "cpu" and one.ndim == 0 for one in node_meta.tensors(node))
        if node.op in ("placeholder", "get_attr"):
            if on_host:
                known.add(node)
        elif node.op == "call_function" and on_host and node_meta.value(node) is not None:
            fixed = (
                op_info.needs_peers(node.target) or op_info.is_random(node.target) or op_info.has_effect(node.target)
            )
            if not fixed and (size_nodes.is_read_of_input(node) or all(arg in known for arg in node.all_input_nodes)):
                known.add(node)
    return known


def _hoist(graph: fx.Graph, numbers: set[fx.Node]) -> None:
    """Moves what the numbers are made of to the front, in order."""
    needed = set(numbers)
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    anchor = _front(graph)
    for node in list(graph.nodes):
        if node in needed and node.op == "call_function":
            anchor.append(node)
            anchor = node


def _front(graph: fx.Graph) -> fx.Node:
    """The last input or constant."""
    for node in graph.find_nodes(op="get_attr"):
        graph.find_nodes(op="placeholder")[-1].append(node)  # a constant is there from the start
    last: fx.Node = next(node for node in reversed(graph.nodes) if node.op in ("placeholder", "get_attr"))
    return last


def _pack(graph: fx.Graph, numbers: list[fx.Node], device: torch.device) -> fx.Node:
    order = graph_edit.positions(graph)
    last = max([*numbers, _front(graph)], key=order.__getitem__)
    with graph.inserting_after(last):
        node = graph.create_node("call_function", pack, (numbers, device), name="packed")
    with node_meta.fake_mode(graph):
        node_meta.set_value(node, torch.empty(len(numbers), dtype=torch.float64, device=device))
    node_meta.set_origin(node, node_meta.origin(numbers[0]))
    return node
