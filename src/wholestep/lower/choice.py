"""Whether a compiler of kernels pays on the CPU: the predicted step node by node, and in compiled segments.

What a compiler makes kernels of itself (additions, norms, updates) loses its calls, and the memory that one such node
writes only for another one to read. Products, convolutions and attention are calls of the same libraries in both.
How long the compilation takes is no part of this: only the user knows how many steps there will be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.fx as fx

from wholestep.cost.compute import works
from wholestep.cost.fusion import OF_LIBRARIES, OF_MEMORY, readers_of, source_of
from wholestep.cost.model import CostModel
from wholestep.program import meta
from wholestep.program.program import Program

ENOUGH = 0.05
"""The share of the computation that has to go. The share itself is predicted to about as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a step as a compiler sees it."""

    host_us: float
    """What the eager backend pays to make the call."""
    device_us: float
    joins: bool = False
    """It becomes part of a kernel of others, and is no call any more."""
    share: float = 1.0
    """How much of its time on the device is left then."""


def saved_share(calls: list[Call]) -> float:
    """How much shorter the calls become in compiled segments: 0.0 not at all, near 1.0 nearly everything."""
    whole_us = sum(call.host_us + call.device_us for call in calls)
    saved_us = sum(call.host_us + (1 - call.share) * call.device_us for call in calls if call.joins)
    return saved_us / whole_us if whole_us else 0.0


def calls_of(program: Program, cost: CostModel, *, compiles: Callable[[fx.Node], bool]) -> list[Call]:
    """The calls of a placed program, collectives and waits left out, as they cost nothing here."""
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    joined = {node for node in nodes if compiles(node) and _is_of_compiler(node)}
    return [
        Call(
            host_us=cost.host_us(node),
            device_us=cost.device_us(node),
            joins=node in joined,
            share=_share(node, joined),
        )
        for node in nodes
    ]


def _is_of_compiler(node: fx.Node) -> bool:
    return not any(work.kind in OF_LIBRARIES for work in works(node))


def _share(node: fx.Node, joined: set[fx.Node]) -> float:
    """The share of the bytes of a node that still travel: those from and to what is in no kernel with it."""
    if not all(work.kind in OF_MEMORY for work in works(node)):
        return 1.0  # its arithmetic takes the time
    read = [(meta.num_bytes(arg), source_of(arg) in joined) for arg in node.all_input_nodes]
    moved = [*read, (meta.num_bytes(node), all(reader in joined for reader in readers_of(node)))]
    whole = sum(count for count, _ in moved)
    return sum(count for count, is_inside in moved if not is_inside) / whole if whole else 1.0
