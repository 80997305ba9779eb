"""What the host only returns, or computes results of, is read at the end of the step.

``loss.item()`` makes the host wait for the GPU. In the middle of a step that ends a CUDA graph, and what comes after it
is launched late; at the end it costs nothing that the caller would not wait for anyway. Before and after::

    number = item(loss)                       clip, update parameters
    clip, update parameters          ->       number = item(loss)
    return number                             return number

What an effect of the step depends on stays, and so does what is read of memory that the step writes to.
"""

from __future__ import annotations

import torch.fx as fx

from wholestep.ir import node_meta, op_info
from wholestep.ir.program import Program, Stage
from wholestep.passes.analysis import write_order

MOST_BYTES = 1 << 20
"""Larger tensors are copied to the host where the step does it: they would take memory of the GPU until the end."""


def defer_host_reads(program: Program) -> Program:
    """The program with host reads after all other calls, where nothing needs them."""
    if program.stage is Stage.SCHEDULED:
        return program
    moving = _moving(program)
    others = [node for node in program.graph.nodes if node.op == "call_function" and node not in moving]
    delayed = sum(_waits_for_gpu(node) and node < others[-1] for node in moving)
    if not delayed:
        return program
    end = program.graph.output_node()
    for node in moving:
        end.prepend(node)
    return program.with_notes(f"{delayed} values go to the host at the end of the step")


def _moving(program: Program) -> list[fx.Node]:
    """The calls that can be the last ones, in order."""
    fixed = {node for nodes in write_order.readers(program).values() for node in nodes}
    deferred: dict[fx.Node, None] = {}
    for node in reversed(program.graph.nodes):
        if node.op != "call_function" or node in fixed or not _is_of_host(node):
            continue
        if node.users and all(user in deferred or user.op == "output" for user in node.users):
            deferred[node] = None
    return list(reversed(deferred))


def _is_of_host(node: fx.Node) -> bool:
    """Whether a call gives something to the host, of the GPU or of the host, and does no more than that."""
    target = node.target
    if op_info.has_effect(target) or op_info.may_fail(target) or target is op_info.VERSION:
        return False
    return node_meta.num_bytes(node) <= MOST_BYTES and not any(one.is_cuda for one in node_meta.tensors(node))


def _waits_for_gpu(node: fx.Node) -> bool:
    return any(one.is_cuda for arg in node.all_input_nodes for one in node_meta.tensors(arg))
