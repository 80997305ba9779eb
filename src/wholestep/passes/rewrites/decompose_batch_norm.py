"""Batch norm in training as operators that a compiler of kernels knows.

Kernels of batch norm update the running statistics in place, which their schemas do not say, so a captured step has
functional twins of them. ATen has such a form itself, which a compiler takes apart: the sums go into one kernel with
what comes before, the rest into one with what follows. Before and after::

    y, mean, rstd, running_mean, running_var = twin of native_batch_norm(x, w, b, running_mean, running_var, True, ...)
    y, mean, rstd, running_mean, running_var = _native_batch_norm_legit_functional(x, w, b, ...)

Those of cuDNN give a reserve besides, for their backward, which becomes that of ATen::

    dx, dw, db = cudnn_batch_norm_backward(x, dy, w, ..., mean, rstd, eps, reserve)
    dx, dw, db = native_batch_norm_backward(dy, x, w, ..., mean, rstd, True, eps, [True, True, True])
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
import torch.fx as fx

from wholestep.capture.functionalize.functionalize import functional_twin
from wholestep.ir import graph_edit, node_meta
from wholestep.ir.program import Program, Stage
from wholestep.ir.sizes import are_same

_aten = torch.ops.aten
_RUNNING = (3, 4)
"""Arguments that are written."""
_PLACES = {
    _aten.native_batch_norm.default: (0, 1, 2, 3, 4),
    _aten.cudnn_batch_norm.default: (0, 1, 2, None, 3, 4),
}
"""Operator -> where each result of its twin stands in ATen's form; None: nowhere, it is cuDNN's reserve."""


def decompose_batch_norm(program: Program) -> Program:
    """The program with batch norms in ATen's functional form, for a compiler."""
    if program.stage is Stage.SCHEDULED:
        return program
    graph, count = program.graph, 0
    for op, places in _PLACES.items():
        for node in graph.find_nodes(op="call_function", target=functional_twin(op, _RUNNING)):
            count += _rewrite(graph, node, places)
    if not count:
        return program
    graph_edit.remove_dead_code(graph)
    return program.with_notes(f"{count} batch norms are written out for the compiler")


def _rewrite(graph: fx.Graph, node: fx.Node, places: Sequence[int | None]) -> bool:
    """Whether it was possible: results stay as they were captured, and only cuDNN's own backward reads its reserve."""
    results = {item: places[item.args[1]] for item in node.users}  # type: ignore[index]
    backward = [user for item, place in results.items() if place is None for user in item.users]
    if any(user.target is not _aten.cudnn_batch_norm_backward.default for user in backward):
        return False
    with graph.inserting_before(node):
        new = graph_edit.emit(graph, _aten._native_batch_norm_legit_functional.default, *node.args, like=node)
    given = node_meta.value(new)
    if not all(place is None or _same(given[place], node_meta.tensor(item)) for item, place in results.items()):
        graph.erase_node(new)
        return False
    for user in backward:
        _rewrite_backward(graph, user)
    for item, place in results.items():
        if place is not None:
            with graph.inserting_before(item):
                one = graph_edit.emit(graph, operator.getitem, new, place, like=item)
            graph_edit.replace_node(item, one)
    return True


def _rewrite_backward(graph: fx.Graph, node: fx.Node) -> None:
    x, grad, weight, mean, var, saved_mean, saved_rstd, eps, _ = node.args
    statistics = (mean, var, saved_mean, saved_rstd)
    with graph.inserting_before(node):
        new = graph_edit.emit(
            graph, _aten.native_batch_norm_backward.default, grad, x, weight, *statistics, True, eps, [True] * 3,
            like=node,
        )  # fmt: skip
    graph_edit.replace_node(node, new)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype is other.dtype and are_same(one.shape, other.shape) and are_same(one.stride(), other.stride())
