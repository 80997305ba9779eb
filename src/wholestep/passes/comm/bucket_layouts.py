"""How tensors lie in the message of a bucket: one after another in a flat one, or each where it is.

Gradients that are summed are copied into a flat message. Shards are not: one call has a message for each of them.
Before and after::

    a' = wait(all_gather(a))              started = all_gather_coalesced([a, b])
    b' = wait(all_gather(b))        ->    a' = wait(started[0])
                                          b' = wait(started[1])

The messages of a call are sent as one group, so that latency is paid once. Nothing is copied into a flat buffer or out
of one, which takes a third of the time of a gather where messages are interleaved.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from wholestep.ir import graph_edit, node_meta, op_info
from wholestep.ir.node_meta import Bucket

_aten = torch.ops.aten

_TOGETHER: dict[Any, Any] = {
    op_info.c10d.all_gather_into_tensor.default: op_info.c10d.all_gather_into_tensor_coalesced.default,
    op_info.c10d.reduce_scatter_tensor.default: op_info.c10d.reduce_scatter_tensor_coalesced.default,
}


def coalesce(graph: fx.Graph, starts: Sequence[fx.Node], record: Bucket, *, at: fx.Node) -> list[fx.Node]:
    """Replaces collectives that differ in their tensor alone by one, before `at`. Gives what each brings.

    A wait stands before the first of those that it replaces, or after the new call.
    """
    if len(starts) == 1:
        node_meta.set_bucket(starts[0], record)
        return [user for user in starts[0].users if user.target is op_info.WAIT]
    with graph.inserting_before(at):
        shards = [_as_real(graph, one) for one in starts]
        together = graph_edit.emit(graph, _TOGETHER[at.target], shards, *at.args[1:], like=at)
        node_meta.set_bucket(together, record)
        items = [graph_edit.emit(graph, operator.getitem, together, number, like=at) for number in range(len(starts))]
    positions = graph_edit.positions(graph)
    waits = []
    for start, item in zip(starts, items, strict=True):
        olds = sorted((user for user in start.users if user.target is op_info.WAIT), key=positions.__getitem__)
        with graph.inserting_before(max(olds[0], at, key=positions.__getitem__)):
            wait = graph_edit.emit(graph, op_info.WAIT, item, like=start)
            if node_meta.tensor(start).is_complex():
                wait = graph_edit.emit(graph, _aten.view_as_complex.default, wait, like=start)
        graph_edit.replace_nodes(dict.fromkeys(olds, wait))
        waits.append(wait)
    for start in starts:
        graph.erase_node(start)
    return waits


def _as_real(graph: fx.Graph, start: fx.Node) -> Any:
    """The tensor of a collective; one of complex numbers as pairs, which calls on lists do not take otherwise."""
    given = start.args[0]
    if not node_meta.tensor(start).is_complex():
        return given
    return graph_edit.emit(graph, _aten.view_as_real.default, given, like=start)


def flatten(graph: fx.Graph, grad: fx.Node) -> fx.Node:
    """The gradient as one dimension in the order of its memory: no copy where it is dense."""
    # ``reshape`` and not ``view``: should a kernel give other strides than its fake one, a copy is made.
    order = memory_order(node_meta.tensor(grad))
    if order is not None:
        grad = graph_edit.emit(graph, _aten.permute.default, grad, order, like=grad)
    return graph_edit.emit(graph, _aten.reshape.default, grad, [-1], like=grad)


def unflatten(graph: fx.Graph, flat: fx.Node, grad: fx.Node) -> fx.Node:
    """Undoes `flatten`: the part of the bucket with the shape and the strides of the gradient."""
    tensor, order = node_meta.tensor(grad), memory_order(node_meta.tensor(grad))
    if order is None:
        return graph_edit.emit(graph, _aten.view.default, flat, list(tensor.shape), like=grad)
    view = graph_edit.emit(graph, _aten.view.default, flat, [tensor.shape[dim] for dim in order], like=grad)
    back = [order.index(dim) for dim in range(len(order))]
    return graph_edit.emit(graph, _aten.permute.default, view, back, like=grad)


def memory_order(tensor: torch.Tensor) -> list[int] | None:
    """The order of dimensions in which a tensor is contiguous; None if it is already, or never."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    return order if not tensor.is_contiguous() and tensor.permute(order).is_contiguous() else None


def granularity_bytes(grad: fx.Node) -> int:
    """The largest power of two that divides the gradient's size, within reason.

    No more than alignment asks for in a type a quarter as wide.

    In falling order of it, every gradient of a bucket begins as aligned as the sizes allow.
    """
    num_bytes = node_meta.num_bytes(grad)
    return min(num_bytes & -num_bytes, 4 * node_meta.ALIGNMENT_BYTES)
