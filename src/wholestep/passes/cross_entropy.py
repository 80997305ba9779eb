"""Cross-entropy over a vocabulary without the logarithms of all probabilities, for a compiler of kernels.

A step keeps ``log_softmax`` of all logits for the backward, in float32: for a language model the largest tensor of all.
Before and after, per row with logits x and target t::

    logs = x - lse(x)                                lse = lse(x)
    loss = -logs[t]                           ->     loss = lse - x[t]
    grad = share * (exp(logs) - onehot(t))           grad = share * (exp(x - lse) - onehot(t))

What the backward reads is then the logits as they are, in the type that the product gave them, and a number per row.
The arithmetic is the same but for the rounding of one subtraction in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.fx as fx
from torch import Tensor

from wholestep.program import edit, meta, ops
from wholestep.program.program import Program, Stage

ops.LIBRARY.define("cross_entropy(Tensor logits, Tensor target, Tensor share, int ignored) -> (Tensor, Tensor)")


@torch.library.register_fake("wholestep::cross_entropy", lib=ops.LIBRARY)  # type: ignore[untyped-decorator,unused-ignore]
def _fake(logits: Tensor, target: Tensor, share: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    return logits.new_empty(logits.shape[:1], dtype=torch.float32), logits.new_empty(logits.shape)


CROSS_ENTROPY = torch.ops.wholestep.cross_entropy.default
"""Losses and gradient of logits, in one: ``lower/cross_entropy.py`` implements it.

Takes logits (rows, classes), answers (rows) int64, the gradient of every loss, one number in float32, and the answer
that does not count. Gives the losses (rows) in float32, 0 where the answer does not count, and the gradient of the
logits, contiguous and in their type.
"""

_aten = torch.ops.aten
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


def lean_cross_entropy(program: Program) -> Program:
    """The program with its cross-entropies rewritten. Those with weights or without a reduction stay as they are.

    The note says how many bytes of logarithms are not kept any more.
    """
    if program.stage is Stage.SCHEDULED:
        return program
    graph, saved, count = program.graph, 0, 0
    for node in graph.find_nodes(op="call_function", target=_aten._log_softmax.default):
        loss = _match(node)
        if loss is not None:
            _rewrite(graph, loss)
            saved += meta.num_bytes(node)
            count += 1
    if not count:
        return program
    edit.remove_dead_code(graph)
    return program.with_notes(f"{count} cross-entropies without {saved:,} B of logarithms for their backward")


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
    if meta.tensor(logits).ndim != 2 or dim not in (1, -1) or forward.args[2] is not None:
        return None
    if forward.args[3] not in (_MEAN, _SUM):
        return None
    if backward is not None and gradient is not None:
        alone = gradient.args[0] is backward and len(backward.users) == 1
        if not alone or backward.args[2:6] != forward.args[1:5]:
            return None
    return _Loss(logits=logits, logs=logs, forward=forward, backward=backward, gradient=gradient)


def _rewrite(graph: fx.Graph, loss: _Loss) -> None:
    like, logits = loss.forward, loss.logits
    dtype, rows = meta.tensor(loss.logs).dtype, meta.tensor(logits).shape[0]

    def call(op: object, *args: object, **kwargs: object) -> fx.Node:
        return edit.emit(graph, op, *args, like=like, **kwargs)  # type: ignore[arg-type]

    with graph.inserting_before(loss.forward):
        highest = call(_aten.amax.default, logits, [1], True)
        spread = call(_aten.exp.default, call(_aten.sub.Tensor, logits, highest))
        total = call(_aten.log.default, call(_aten.sum.dim_IntList, spread, [1], True))
        lse = call(_aten.add.Tensor, highest, total)
        counts = call(_aten.ne.Scalar, loss.target, loss.ignored)
        zero = call(_aten.full.default, [], 0, dtype=torch.int64, device=meta.tensor(loss.target).device)
        column = call(_aten.unsqueeze.default, call(_aten.where.self, counts, loss.target, zero), 1)
        picked = call(_aten.sub.Tensor, lse, call(_aten.gather.default, logits, 1, column))
        nothing = call(_aten.full.default, [], 0.0, dtype=dtype, device=meta.tensor(logits).device)
        each = call(_aten.where.self, counts, call(_aten.view.default, picked, [rows]), nothing)
        weight = call(_aten._to_copy.default, call(_aten.sum.default, counts), dtype=dtype)
        result = call(_aten.sum.default, each)
        if loss.forward.args[3] == _MEAN:
            result = call(_aten.div.Tensor, result, weight)
    for item in list(loss.forward.users):
        edit.replace_node(item, (result, weight)[item.args[1] == 1])
    if loss.gradient is None or loss.backward is None:
        return
    like = loss.gradient
    with graph.inserting_before(loss.gradient):
        share = loss.backward.args[0]
        if loss.forward.args[3] == _MEAN:
            share = call(_aten.div.Tensor, share, loss.backward.args[6])
        shares = call(_aten.where.self, call(_aten.unsqueeze.default, counts, 1), share, nothing)
        length, device = meta.tensor(logits).shape[1], meta.tensor(logits).device
        classes = call(_aten.arange.start_step, 0, length, 1, dtype=torch.int64, device=device, pin_memory=False)
        hits = call(_aten._to_copy.default, call(_aten.eq.Tensor, classes, column), dtype=dtype)
        chances = call(_aten.exp.default, call(_aten.sub.Tensor, logits, lse))
        gradient = call(_aten.mul.Tensor, call(_aten.sub.Tensor, chances, hits), shares)
    edit.replace_node(loss.gradient, gradient)
