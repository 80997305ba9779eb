"""Updates run on a stream beside the backward: one is bound by memory, the other by arithmetic and by launches.

Before and after::

    wait = wait_tensor(all_reduce)               begin_beside()
    update = run_segment_3([w, wait, ...])       wait = wait_tensor(all_reduce)
    segment_4 = run_segment_4([...])       ->    update = run_segment_3([w, wait, ...])
    ...                                          end_beside()
                                                 segment_4 = run_segment_4([...])
                                                 ...
                                                 join_beside([wait, ...])

The main stream then never waits for communication that only updates need. What runs beside starts behind all that
stands before it, and nothing on the main stream touches what it writes, or writes to what it reads, until both meet at
the end; what it reads is held until then, so that no later kernel of the main stream gets its memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.fx as fx

from wholestep.passes.alias import span_of
from wholestep.passes.segments import is_view
from wholestep.program import edit, meta, ops
from wholestep.program.meta import Region
from wholestep.program.program import Program


@cache
def _streams(device: int) -> tuple[torch.cuda.Stream, list[torch.cuda.Stream]]:
    """The stream beside, and the streams to go back to, of one device."""
    return torch.cuda.Stream(device), []


def begin_beside() -> None:
    """What follows runs on the stream beside, behind all that the current stream was given."""
    beside, before = _streams(torch.cuda.current_device())
    current = torch.cuda.current_stream()
    before.append(current)
    beside.wait_stream(current)
    torch.cuda.set_stream(beside)


def end_beside() -> None:
    """What follows runs on the stream that `begin_beside` has left."""
    torch.cuda.set_stream(_streams(torch.cuda.current_device())[1].pop())


def join_beside(held: list[Any]) -> None:
    """The current stream waits for the stream beside. `held` is what had to stay alive until now."""
    torch.cuda.current_stream().wait_stream(_streams(torch.cuda.current_device())[0])


def run_updates_beside(program: Program) -> Program:
    """A scheduled program whose updates of inputs run on a stream of their own, where nothing behind reads them."""
    program = edit.copy(program)
    graph = program.graph
    beside = updates_beside(graph)
    if not beside:
        return program
    inside = False
    for node in list(graph.nodes):
        if node.op != "call_function" and node.op != "output":
            continue
        if (node in beside) != inside:
            with graph.inserting_before(node):
                graph.call_function(end_beside if inside else begin_beside)
            inside = not inside
    held = dict.fromkeys(arg for node in graph.nodes if node in beside for arg in node.all_input_nodes)
    values = [node for node in held if node.op == "call_function"]
    with graph.inserting_before(graph.output_node()):
        graph.call_function(join_beside, (values,))
    return replace(program, module=program.module)


def updates_beside(graph: fx.Graph) -> set[fx.Node]:
    """Calls that may run beside: updates that nobody reads, and the waits and views that they alone read.

    Those behind the last computation of the main stream stay there.
    """
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    chosen: set[fx.Node] = set()
    touched: set[int] = set()
    rewritten: set[int] = set()
    computes = False
    for node in reversed(nodes):
        alone = bool(node.users) and all(user in chosen for user in node.users)
        feeds = alone and (node.target is ops.WAIT or is_view(node))
        free = touched.isdisjoint(_written(node)) and rewritten.isdisjoint(_read(node))
        if feeds or (computes and _is_update(node) and free):
            chosen.add(node)
            continue
        touched.update(_read(node))
        rewritten.update(_written(node))
        computes |= not is_view(node) and not ops.needs_peers(node.target)
    return chosen


def _is_update(node: fx.Node) -> bool:
    return not node.users and meta.origin(node).region is Region.OPTIMIZER and any(True for _ in _written(node))


def _read(node: fx.Node) -> Iterator[int]:
    return (span_of(one).storage for arg in node.all_input_nodes for one in meta.tensors(arg))


def _written(node: fx.Node) -> Iterator[int]:
    positions = ops.written_by(node.target, node.kwargs)
    return (span_of(one).storage for arg in _nodes(node, positions) for one in meta.tensors(arg))


def _nodes(node: fx.Node, positions: tuple[int, ...]) -> Iterable[fx.Node]:
    return edit.nodes_of([node.args[position] for position in positions if position < len(node.args)])
