"""Moves each wait right before the first call that reads the data.

A wait and the views of what has arrived are placed when buckets are made, before the first of their readers at that
time. Updates that were moved since, and do not need them, would wait, too. Before and after::

    wait_1 = wait(bucket_1)                   update(bucket 0)
    part = view(wait_1)              ->       wait_1 = wait(bucket_1)
    update(bucket 0)                          part = view(wait_1)
    update(bucket 1): reads part              update(bucket 1): reads part
"""

from __future__ import annotations

import torch.fx as fx

from wholestep.ir import op_info
from wholestep.ir.program import Program, Stage


def sink_waits(program: Program) -> Program:
    """The program with every wait, and views of it, right before its first reader.

    The note says how many waits have others to pass.
    """
    if program.stage is Stage.SCHEDULED:
        return program
    delayed = 0
    for node in reversed(list(program.graph.nodes)):
        if node.op != "call_function" or not node.users or not (node.target is op_info.WAIT or op_info.is_view(node)):
            continue
        first = min(node.users)
        delayed += node.target is op_info.WAIT and _computes_before(node, first)
        first.prepend(node)
    return program.with_notes(f"{delayed} waits stand after calls that do not need them") if delayed else program


def _computes_before(node: fx.Node, end: fx.Node) -> bool:
    """Whether anything runs between two nodes."""
    node = node.next
    while node is not end:
        if node.op == "call_function" and node.target is not op_info.WAIT and not op_info.is_view(node):
            return True
        node = node.next
    return False
