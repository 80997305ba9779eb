"""Cross-entropy without keeping the logarithms of all probabilities.

A step keeps ``log_softmax`` of all logits for the backward, in float32: for a language model the largest tensor of all.
Before and after, per row with logits x and target t::

    logs = x - lse(x)                                lse = lse(x)
    loss = -logs[t]                           ->     loss = lse - x[t]
    grad = share * (exp(logs) - onehot(t))           grad = share * (exp(x - lse) - onehot(t))

What the backward reads is then the logits as they are, in the type that the product gave them, and a number per row.
The arithmetic is the same but for the rounding of one subtraction in float32. On a GPU one kernel (`CROSS_ENTROPY`)
does both, since a step mostly knows the gradient of its loss, 1, before it computes the loss.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.fx as fx
from torch import Tensor

from wholestep.ir import graph_edit, node_meta, op_info
from wholestep.ir.ops.library import LIBRARY
from wholestep.ir.program import Program, Stage

LIBRARY.define(
    "cross_entropy(Tensor logits, Tensor target, Tensor share, int ignored, int? classes=None) -> (Tensor, Tensor)"
)


@torch.library.register_fake("wholestep::cross_entropy", lib=LIBRARY)  # type: ignore[untyped-decorator,unused-ignore]
def _fake(
    logits: Tensor, target: Tensor, share: Tensor, ignored: int, classes: int | None = None
) -> tuple[Tensor, Tensor]:
    return logits.new_empty(logits.shape[:1], dtype=torch.float32), logits.new_empty(logits.shape)


CROSS_ENTROPY = torch.ops.wholestep.cross_entropy.default
"""Losses and gradient of logits, in one: ``lower/kernels/cross_entropy.py`` implements it.

Takes logits (rows, columns), answers (rows) int64, the gradient of every loss, one number in float32, the answer that
does not count, and how many of the columns are classes, if not all are. Gives the losses (rows) in float32, 0 where the
answer does not count, and the gradient of the logits, contiguous and in their type, 0 in columns that are no classes.
"""

_aten = torch.ops.aten
_LOSS = frozenset({_aten.nll_loss_forward.default, _aten.nll_loss_backward.default})
_MEAN = 1
_SUM = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loss:
    """The nodes of one cross-entropy: forward and, if there is one, backward."""

    logits: fx.Node
    logs: fx.Node
    forward: fx.Node
    backward: fx.Node | None
    """The gradient of `logs`."""
    gradient: fx.Node | None
    """The gradient of `logits`."""

    @property
    def target(self) -> fx.Node:
        """(rows) int64: the right answers."""
        return self.forward.args[1]  # type: ignore[return-value]

    @property
    def ignored(self) -> object:
        """The answer that does not count."""
        return self.forward.args[4]


def fuse_cross_entropy(program: Program, *, fuses: Callable[[fx.Node], bool] = lambda product: False) -> Program:
    """The program with its cross-entropies rewritten.

    Those with weights or without a reduction stay as they are.

    `fuses` says of the operator that gives the logits, before views and a cast to float32, whether `CROSS_ENTROPY` is
    to read its result. The gradient is computed with the loss then, so it must not depend on the value of the loss.

    Notes say how many bytes of logarithms are not kept any more, and how many losses are one kernel with a gradient.
    """
    if program.stage is Stage.SCHEDULED:
        return program
    graph, saved, count, fused = program.graph, 0, 0, 0
    for found in graph.find_nodes(op="call_function", target=_aten._log_softmax.default):
        node = _in_float32(graph, found)
        loss = _match(node)
        if loss is None:
            continue
        path = _path(loss)
        if path is not None and fuses(path.product) and _bring_share_up(graph, loss):
            _fuse(graph, loss, path)
            fused += 1
        else:
            _rewrite(graph, loss)
        saved += node_meta.num_bytes(node)
        count += 1
    if not count:
        return program
    graph_edit.remove_dead_code(graph)
    return program.with_notes(
        f"{count} cross-entropies without {saved:,} B of logarithms for their backward",
        *([f"{fused} cross-entropies are one kernel with their gradient"] if fused else []),
    )


def _in_float32(graph: fx.Graph, logs: fx.Node) -> fx.Node:
    """Logarithms of logits in half precision, in float32 with the casts as nodes of their own; others as they are.

    Under autocast on a GPU ``log_softmax`` gives float32, and its gradient in half precision: casts before the one
    and after the other. What ``cross_entropy`` calls gives half precision there, of which the loss reads a cast to
    float32: that rounding is left out, as compilers leave it out that fuse both.
    """
    gradients = {user: user.args[0] for user in logs.users if user.target is _aten._log_softmax_backward_data.default}
    readers = [user for user in logs.users if user not in gradients]
    old = logs
    if not logs.args[2]:
        alone = len(readers) == 1 and _widens(readers[0]) and {user.target for user in readers[0].users} <= _LOSS
        if not alone or not all(map(_narrows, gradients.values())):
            return logs
        old = readers[0]
        gradients = {user: narrow.all_input_nodes[0] for user, narrow in gradients.items()}  # type: ignore[union-attr]
    logits, dim, _ = logs.args
    with graph.inserting_before(logs):
        wide = graph_edit.emit(graph, _aten._to_copy.default, logits, dtype=torch.float32, like=logs)
        new = graph_edit.emit(graph, _aten._log_softmax.default, wide, dim, False, like=logs)
    for user, given in gradients.items():
        with graph.inserting_before(user):
            full = graph_edit.emit(graph, user.target, given, new, dim, torch.float32, like=user)  # type: ignore[arg-type]
            cast = graph_edit.emit(graph, _aten._to_copy.default, full, dtype=_dtype(user), like=user)
        graph_edit.replace_node(user, cast)
    graph_edit.replace_node(old, new)
    graph_edit.remove_dead_code(graph)
    return new


def _match(logs: fx.Node) -> _Loss | None:
    logits, dim, _ = logs.args
    readers = {}
    for user in logs.users:
        if user.target in readers:
            return None
        readers[user.target] = user
    forward = readers.pop(_aten.nll_loss_forward.default, None)
    backward = readers.pop(_aten.nll_loss_backward.default, None)
    gradient = readers.pop(_aten._log_softmax_backward_data.default, None)
    if readers or forward is None or not isinstance(logits, fx.Node) or (backward is None) != (gradient is None):
        return None
    if node_meta.tensor(logits).ndim != 2 or dim not in (1, -1) or forward.args[2] is not None:
        return None
    if forward.args[3] not in (_MEAN, _SUM):
        return None
    if backward is not None and gradient is not None:
        alone = gradient.args[0] is backward and len(backward.users) == 1
        if not alone or backward.args[2:6] != forward.args[1:5]:
            return None
    return _Loss(logits=logits, logs=logs, forward=forward, backward=backward, gradient=gradient)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Path:
    """How logits come to a loss, and their gradient back."""

    product: fx.Node
    views: list[fx.Node]
    """What views there are between the two, first to last, a cast to float32 left out."""
    back: dict[fx.Node, list[fx.Node]]
    """What the rest of the step reads of the gradient, through views and a cast back, and those views."""


def _path(loss: _Loss) -> _Path | None:
    """How a kernel reads the logits and writes their gradient; None where it cannot."""
    if loss.gradient is None or not node_meta.tensor(loss.gradient).is_contiguous():
        return None
    views: list[fx.Node] = []
    node, cast = loss.logits, None
    while op_info.is_view(node) or (cast is None and _widens(node)):
        cast = cast if op_info.is_view(node) else node
        views += [node] if node is not cast else []
        node = node.all_input_nodes[0]
    back = {loss.gradient: list[fx.Node]()} if cast is None else _casts(loss.gradient, _dtype(node))
    if back is None or node_meta.tensor(loss.logits).stride(1) != 1:
        return None
    return _Path(product=node, views=views[::-1], back=back)


def _casts(gradient: fx.Node, dtype: torch.dtype) -> dict[fx.Node, list[fx.Node]] | None:
    """The casts to a type that read a gradient, and the views before; None for other readers."""
    casts: dict[fx.Node, list[fx.Node]] = {}
    todo: list[tuple[fx.Node, list[fx.Node]]] = [(user, []) for user in gradient.users]
    while todo:
        node, views = todo.pop()
        if op_info.is_view(node):
            todo += [(user, [*views, node]) for user in node.users]
        elif _is_cast(node) and _dtype(node) is dtype:
            casts[node] = views
        else:
            return None
    return casts


def _is_cast(node: fx.Node) -> bool:
    """Whether the node changes the type of its argument and nothing else."""
    if node.target is not _aten._to_copy.default:
        return False
    old, new = node_meta.tensor(node.all_input_nodes[0]), node_meta.tensor(node)
    return old.stride() == new.stride() and old.device == new.device


def _widens(node: fx.Node) -> bool:
    half = (torch.bfloat16, torch.float16)
    return _is_cast(node) and _dtype(node) is torch.float32 and _dtype(node.all_input_nodes[0]) in half


def _narrows(node: object) -> bool:
    return isinstance(node, fx.Node) and _is_cast(node) and _dtype(node.all_input_nodes[0]) is torch.float32


def _dtype(node: fx.Node) -> torch.dtype:
    return node_meta.tensor(node).dtype


def _bring_share_up(graph: fx.Graph, loss: _Loss) -> bool:
    """Moves what the gradient of the loss is computed from before the loss; whether that can be."""
    assert loss.backward is not None  # there is a gradient
    position, late = graph_edit.positions(graph), dict[fx.Node, None]()
    todo = [loss.backward.args[0]]
    while todo:
        node = todo.pop()
        assert isinstance(node, fx.Node)  # a gradient, or an argument of what it is computed from
        if position[node] < position[loss.forward] or node in late:
            continue
        waits = op_info.is_collective(node) or op_info.needs_peers(node.target)
        if waits or op_info.has_effect(node.target) or op_info.may_fail(node.target):  # as the loss itself may
            return False
        late[node] = None
        todo += [] if node.target is _aten.ones_like.default else node.all_input_nodes
    for node in sorted(late, key=position.__getitem__):
        loss.forward.prepend(node)
        if node.target is _aten.ones_like.default:  # autograd begins with one for the loss
            _write_out(graph, node)
    return True


def _write_out(graph: fx.Graph, ones: fx.Node) -> None:
    """Puts ones that look at nobody in the place of ``ones_like``."""
    value = node_meta.tensor(ones)
    with graph.inserting_before(ones):
        new = graph_edit.emit(
            graph, _aten.full.default, list(value.shape), 1, dtype=value.dtype, device=value.device, like=ones
        )
    graph_edit.replace_node(ones, new)


def _fuse(graph: fx.Graph, loss: _Loss, path: _Path) -> None:
    """Puts one call of `CROSS_ENTROPY` in the place of the loss and its gradient."""
    assert loss.backward is not None  # there is a gradient
    dtype, single, is_mean = _dtype(loss.logs), torch.float32, loss.forward.args[3] == _MEAN

    def call(op: object, *args: object, **kwargs: object) -> fx.Node:
        return graph_edit.emit(graph, op, *args, like=loss.forward, **kwargs)  # type: ignore[arg-type]

    def to(node: fx.Node, wanted: torch.dtype) -> fx.Node:
        return node if _dtype(node) is wanted else call(_aten._to_copy.default, node, dtype=wanted)

    def apply_views(node: fx.Node, views: list[fx.Node]) -> fx.Node:
        for view in views:
            node = call(view.target, node, *view.args[1:], **view.kwargs)
        return node

    with graph.inserting_before(loss.forward):
        weight = to(call(_aten.sum.default, call(_aten.ne.Scalar, loss.target, loss.ignored)), single)
        share = to(loss.backward.args[0], single)  # type: ignore[arg-type]
        share = call(_aten.div.Tensor, share, weight) if is_mean else share
        both = call(CROSS_ENTROPY, apply_views(path.product, path.views), loss.target, share, loss.ignored)
        result = call(_aten.sum.default, call(operator.getitem, both, 0))
        result = call(_aten.div.Tensor, result, weight) if is_mean else result
        result, weight = to(result, dtype), to(weight, dtype)
        gradient = call(operator.getitem, both, 1)
        gradients = {reader: apply_views(gradient, views) for reader, views in path.back.items()}
    for item in list(loss.forward.users):
        graph_edit.replace_node(item, (result, weight)[item.args[1] == 1])
    for reader, new in gradients.items():
        graph_edit.replace_node(reader, new)


def _rewrite(graph: fx.Graph, loss: _Loss) -> None:
    like, logits = loss.forward, loss.logits
    dtype, rows = node_meta.tensor(loss.logs).dtype, node_meta.tensor(logits).shape[0]

    def call(op: object, *args: object, **kwargs: object) -> fx.Node:
        return graph_edit.emit(graph, op, *args, like=like, **kwargs)  # type: ignore[arg-type]

    with graph.inserting_before(loss.forward):
        highest = call(_aten.amax.default, logits, [1], True)
        spread = call(_aten.exp.default, call(_aten.sub.Tensor, logits, highest))
        total = call(_aten.log.default, call(_aten.sum.dim_IntList, spread, [1], True))
        lse = call(_aten.add.Tensor, highest, total)
        counts = call(_aten.ne.Scalar, loss.target, loss.ignored)
        zero = call(_aten.full.default, [], 0, dtype=torch.int64, device=node_meta.tensor(loss.target).device)
        column = call(_aten.unsqueeze.default, call(_aten.where.self, counts, loss.target, zero), 1)
        picked = call(_aten.sub.Tensor, lse, call(_aten.gather.default, logits, 1, column))
        nothing = call(_aten.full.default, [], 0.0, dtype=dtype, device=node_meta.tensor(logits).device)
        each = call(_aten.where.self, counts, call(_aten.view.default, picked, [rows]), nothing)
        weight = call(_aten._to_copy.default, call(_aten.sum.default, counts), dtype=dtype)
        result = call(_aten.sum.default, each)
        if loss.forward.args[3] == _MEAN:
            result = call(_aten.div.Tensor, result, weight)
    for item in list(loss.forward.users):
        graph_edit.replace_node(item, (result, weight)[item.args[1] == 1])
    if loss.gradient is None or loss.backward is None:
        return
    like = loss.gradient
    with graph.inserting_before(loss.gradient):
        share = loss.backward.args[0]
        if loss.forward.args[3] == _MEAN:
            share = call(_aten.div.Tensor, share, loss.backward.args[6])
        shares = call(_aten.where.self, call(_aten.unsqueeze.default, counts, 1), share, nothing)
        length, device = node_meta.tensor(logits).shape[1], node_meta.tensor(logits).device
        classes = call(_aten.arange.start_step, 0, length, 1, dtype=torch.int64, device=device, pin_memory=False)
        hits = call(_aten._to_copy.default, call(_aten.eq.Tensor, classes, column), dtype=dtype)
        chances = call(_aten.exp.default, call(_aten.sub.Tensor, logits, lse))
        gradient = call(_aten.mul.Tensor, call(_aten.sub.Tensor, chances, hits), shares)
    graph_edit.replace_node(loss.gradient, gradient)
