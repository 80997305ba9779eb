"""Editing a graph: copy, dead code, emitting new nodes with their values."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from wholestep.errors import InternalError
from wholestep.ir import node_meta, op_info
from wholestep.ir.lazy_graph_module import module_of
from wholestep.ir.program import Program
from wholestep.ir.size_nodes import size_argument


def copy(program: Program) -> Program:
    """A program whose graph may be edited without changing the original. Taken at stage borders."""
    graph = fx.Graph()
    memo: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(program.graph, memo))
    new = module_of(program.module, graph)
    for old_node, new_node in memo.items():
        node_meta.copy_meta(old_node, new_node)
    return replace(program, module=new)


def remove_dead_code(graph: fx.Graph) -> int:
    """Removes nodes that nobody reads and that have no effect. Placeholders stay. Returns how many went."""
    removed = 0
    for node in reversed(list(graph.nodes)):
        if node.users or node.op in ("placeholder", "output"):
            continue
        if node.op == "call_function" and (op_info.has_effect(node.target) or _takes_part(node)):
            continue
        graph.erase_node(node)
        removed += 1
    return removed


def _takes_part(node: fx.Node) -> bool:
    """Whether the node starts or ends a collective that other ranks take part in, whoever reads it here.

    A metric may be reduced on all ranks and read on one. Reductions of gradients are ours: each of them is read
    until a pass has replaced it on every rank.
    """
    start = op_info.waited_for(node) if node.target is op_info.WAIT else node
    if not op_info.is_collective(start):
        return node.target is op_info.WAIT  # for a collective that was started before the step
    return node_meta.bucket(start) is None or bool(op_info.mutated_args(start.target))


def emit(
    graph: fx.Graph, target: Callable[..., Any], *args: Any, like: fx.Node | None = None, **kwargs: Any
) -> fx.Node:
    """Adds a call at the graph's insertion point and computes its value with the fake values of its arguments.

    `like` gives the new node its origin (part of the step, module, source line). Sizes that move may be given as they
    are: they become calls, too.
    """
    args, kwargs = pytree.tree_map_only(torch.SymInt, lambda size: size_argument(graph, size), (args, kwargs))
    node = graph.call_function(target, args, kwargs)
    evaluate(node)
    if like is not None:
        node_meta.set_origin(node, node_meta.origin(like))
    return node


def evaluate(node: fx.Node) -> None:
    """Computes the value of a call with the fake values of its arguments, and records it."""
    args, kwargs = pytree.tree_map(
        lambda a: node_meta.value(a) if isinstance(a, fx.Node) else a, (node.args, node.kwargs)
    )
    if node.target is operator.getitem:
        node_meta.set_value(node, args[0][args[1]])
    elif op_info.gives_first(node.target):
        node_meta.set_value(node, args[0])
    else:
        with node_meta.fake_mode(node.graph), torch.no_grad():
            node_meta.set_value(node, node.target(*args, **kwargs))  # type: ignore[operator]


def replace_node(old: fx.Node, new: fx.Node) -> None:
    """Every reader of `old` reads `new`; `old` is erased."""
    replace_nodes({old: new})


def replace_nodes(replaced: Mapping[fx.Node, fx.Node]) -> None:
    """Every reader of a key reads its value (or what replaces that); the keys are erased.

    Each reader is written once, however many of its arguments change: an optimizer's list or the results of a step
    are as long as the model has parameters.
    """
    final: dict[fx.Node, fx.Node] = {}
    for old in replaced:
        new = replaced[old]
        while new in replaced:
            new = replaced[new]
        final[old] = new
    for user in dict.fromkeys(user for old in final for user in old.users if user not in final):
        user.args, user.kwargs = fx.node.map_arg((user.args, user.kwargs), lambda arg: final.get(arg, arg))
    for old in final:
        old.args, old.kwargs = (), {}
    for old in final:
        old.graph.erase_node(old)


def renew_views(node: fx.Node) -> None:
    """Lets the values of views be views of the node's value, so that one sees whose memory they are."""
    for user in node.users:
        if op_info.is_view(user):
            evaluate(user)
            renew_views(user)


def positions(graph: fx.Graph) -> dict[fx.Node, int]:
    """The place of each node in the order of the graph."""
    return {node: index for index, node in enumerate(graph.nodes)}


def set_results(graph: fx.Graph, results: Sequence[Any]) -> None:
    """Replaces what the graph returns."""
    graph.output_node().args = (tuple(results),)


def nodes_of(tree: Any) -> Iterable[fx.Node]:
    """Every node inside a nest of arguments."""
    if isinstance(tree, fx.Node):
        yield tree
    elif isinstance(tree, (list, tuple, dict)):
        for one in tree.values() if isinstance(tree, dict) else tree:
            yield from nodes_of(one)


def sort_topologically(graph: fx.Graph) -> None:
    """Moves nodes that stand before one of their arguments to just after the last of them; else keeps order.

    What draws from a random generator, or sets it, waits for the one before it too.
    """
    done: set[fx.Node] = set()
    drawing = [node for node in graph.nodes if node.op == "call_function" and op_info.draws(node)]
    before = dict(zip(drawing[1:], drawing, strict=False))
    waiting: dict[fx.Node, list[fx.Node]] = {}
    cursor = next(iter(graph.nodes))
    pending = list(graph.nodes)

    def place(node: fx.Node) -> None:
        nonlocal cursor
        stack = [node]
        while stack:
            one = stack.pop()
            needed = one.all_input_nodes if one not in before else (*one.all_input_nodes, before[one])
            missing = next((arg for arg in needed if arg not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(one)
                continue
            if one is not cursor:
                cursor.append(one)
            cursor = one
            done.add(one)
            stack.extend(reversed(waiting.pop(one, [])))

    for node in pending:
        place(node)
    if waiting:
        raise InternalError(f"nodes that wait for each other: {', '.join(one.name for one in waiting)}")
