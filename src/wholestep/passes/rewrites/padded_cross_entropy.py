"""The kernel of cross-entropy reads and writes rows that products have padded, as they are.

`pad_matmul` leaves it a part of padded logits, and pads with zeros the gradient that it gives: the largest tensor
of a language model, written twice. The kernel writes the zeros itself. Before and after, with V classes in rows of W::

    both = cross_entropy(wide[:, :V], ...)            both = cross_entropy(wide, ..., classes=V)
    gradient = both[1]                         ->     rows = both[1]                               # zeros after V
    rows = pad(gradient, W - V)                       gradient = rows[:, :V]
"""

from __future__ import annotations

import operator

import torch
import torch.fx as fx

from wholestep.ir import graph_edit, node_meta
from wholestep.ir.program import Program, Stage
from wholestep.ir.sizes import is_same
from wholestep.passes.rewrites import padded_views
from wholestep.passes.rewrites.fuse_cross_entropy import CROSS_ENTROPY

_aten = torch.ops.aten


def pad_cross_entropy(program: Program) -> Program:
    """The program with cross-entropies that write the padding of their gradients.

    The note says how many do.
    """
    if program.stage is Stage.SCHEDULED:
        return program
    losses = program.graph.find_nodes(op="call_function", target=CROSS_ENTROPY)
    count = sum(_widen(loss) for loss in losses)
    if not count:
        return program
    graph_edit.remove_dead_code(program.graph)
    return program.with_notes(f"{count} cross-entropies have logits in whole rows, with zeros after the classes")


def writes_zeros(tensor: fx.Node) -> bool:
    """Whether a tensor is written with its zeros: the gradient of a slice of logits."""
    if tensor.target is not operator.getitem:
        return False
    loss, item = tensor.args
    assert isinstance(loss, fx.Node)  # whose item it is
    if loss.target is not CROSS_ENTROPY or item != 1:
        return False
    logits = loss.args[0]
    assert isinstance(logits, fx.Node)  # a tensor
    return _wide_matrix(logits) is not None


def _widen(loss: fx.Node) -> bool:
    """Has one call read and write whole rows; whether it can, and somebody reads them."""
    logits, *others = loss.args
    assert isinstance(logits, fx.Node)  # a tensor
    wide = _wide_matrix(logits)
    gradient = next((user for user in loss.users if user.target is operator.getitem and user.args[1] == 1), None)
    if wide is None or gradient is None:
        return False
    shape, columns = node_meta.tensor(logits).shape, node_meta.tensor(wide).shape[1]
    zeros = [0, columns - shape[1]]
    padded = [user for user in gradient.users if user.target is _aten.constant_pad_nd.default and user.args[1] == zeros]
    if not padded:
        return False
    sliced = node_meta.tensor(gradient).new_empty(shape[0], columns)[:, : shape[1]]
    fit = padded_views.readers_that_fit(gradient, sliced)
    loss.args = (wide, *others, shape[1])
    graph_edit.evaluate(loss)
    for item in loss.users:
        graph_edit.evaluate(item)
    padded_views.replace_readers(gradient, padded_views.leading_slice(gradient, shape), fit)
    graph_edit.replace_nodes(dict.fromkeys(padded, gradient))
    graph_edit.renew_views(gradient)
    return True


def _wide_matrix(logits: fx.Node) -> fx.Node | None:
    """The matrix of which logits are the first columns; None if they are all of theirs."""
    sliced = padded_views.through_reshapes(logits)
    if sliced.target is not _aten.slice.Tensor:
        return None
    wide, *cut = sliced.args
    assert isinstance(wide, fx.Node)  # a tensor
    rows, columns = node_meta.tensor(sliced).shape
    return wide if cut == [1, 0, columns] and is_same(node_meta.tensor(wide).shape[0], rows) else None
