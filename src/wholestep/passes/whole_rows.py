"""Logits of whole vectors of memory, however large the vocabulary is.

Rows of 50,257 numbers in half precision begin anywhere, and libraries of products have kernels for that which take
several times as long, for the logits of GPT-2 and for both products that read their gradient. So the weight gets rows
of zeros, as its cast is written anyway. Before and after, with V classes in rows of W >= V, multiples of 128 bytes::

    logits = mm(x, w.t())                   wide = pad(w, W - V);  logits = mm(x, wide.t())
    loss, grad = cross_entropy(logits)      loss, grad = cross_entropy(logits, classes=V)     # zeros behind V
    dx = mm(grad, w)                   ->   dx = mm(grad, wide)
    dw = mm(grad.t(), x)                    dw = mm(grad[:, :V].t(), x)

The numbers are the same: sums get zeros besides. torch.compile pads products as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.fx as fx

from wholestep.program import edit, meta, ops

_ROW_BYTES = 128
"""A line of a GPU's cache."""
_FEWEST_CLASSES = 512
"""Of fewer, zeros would be more than a tenth, and products are small."""

_HALF = (torch.bfloat16, torch.float16)
_aten = torch.ops.aten
_RESHAPES = frozenset({_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default})


class WholeRows:
    """Products of one weight in whole rows."""

    def __init__(self, graph: fx.Graph, product: fx.Node) -> None:
        """`product`: an ``mm`` or ``addmm`` that gives logits (rows, V), which only a loss reads."""
        given = meta.tensor(product)
        per_row = _ROW_BYTES // given.element_size()
        self._graph, self.classes = graph, given.shape[1]
        self._more = -self.classes % per_row
        self._wide: dict[tuple[fx.Node, int], fx.Node] = {}
        bias = product.args[:-2]
        with graph.inserting_before(product):
            wide_bias = [
                edit.emit(graph, _aten.constant_pad_nd.default, one, [0, self._more], like=product) for one in bias
            ]
        weight = self._widened(product.args[-1], 1, product)
        with graph.inserting_before(product):
            self.logits = edit.emit(graph, product.target, *wide_bias, product.args[-2], weight, like=product)  # type: ignore[arg-type]

    def take(self, gradient: fx.Node, parts: Iterable[fx.Node]) -> None:
        """Lets products with the gradient (rows, W) of the logits read all of it. `parts`: its V columns, seen through
        views; who views them further gets other strides."""
        for part in parts:
            for node, value in [(part, meta.tensor(part)), *_viewed(part, meta.tensor(part))]:
                meta.set_value(node, value)
                for user in list(node.users):
                    if user.target is _aten.mm.default and user.args[0] is node and self._is_all(value):
                        user.args = (gradient, self._widened(user.args[1], 0, user))

    def _is_all(self, part: torch.Tensor) -> bool:
        whole = meta.tensor(self.logits)
        return part.shape == (whole.shape[0], self.classes) and part.stride() == whole.stride()

    def _widened(self, weight: object, dim: int, reader: fx.Node) -> fx.Node:
        """A weight of V rows (`dim` 0) or columns (1) with zeros behind them, made once."""
        assert isinstance(weight, fx.Node)  # an argument of a product
        base, turned = weight, False
        while base.target is _aten.t.default or (base.target is _aten.permute.default and base.args[1] == [1, 0]):
            base, turned = base.all_input_nodes[0], not turned
        place = base, dim ^ turned
        if place not in self._wide:
            sides = [0, self._more] if place[1] == 1 else [0, 0, 0, self._more]
            with self._graph.inserting_after(_last_of_inputs(base)):
                self._wide[place] = edit.emit(self._graph, _aten.constant_pad_nd.default, base, sides, like=reader)
        wide = self._wide[place]
        if not turned:
            return wide
        with self._graph.inserting_before(reader):
            return edit.emit(self._graph, _aten.t.default, wide, like=reader)


def pay(product: fx.Node, logits: fx.Node, views: Sequence[fx.Node]) -> bool:
    """Whether a product is to be laid out so. `views` are those through which a loss reads it as `logits`."""
    given = meta.tensor(product)
    if product.target not in (_aten.mm.default, _aten.addmm.default) or product.kwargs or given.dtype not in _HALF:
        return False
    if product.target is _aten.addmm.default and meta.tensor(product.args[0]).dim() != 1:  # type: ignore[arg-type]
        return False
    same = meta.tensor(logits).shape == given.shape and all(view.target in _RESHAPES for view in views)
    odd = given.shape[1] * given.element_size() % meta.ALIGNMENT_BYTES != 0
    return same and odd and given.shape[1] >= _FEWEST_CLASSES


def allow(part: torch.Tensor, views: Sequence[fx.Node], reader: fx.Node) -> bool:
    """Whether columns of a matrix can be seen through views, each of the one before, and those behind `reader`."""
    try:
        for view in views:
            part = _through(view, part)
        return all(True for _ in _viewed(reader, part))
    except (RuntimeError, ValueError):  # other columns are in the way; fake tensors say so by a ValueError
        return False


def _viewed(node: fx.Node, value: torch.Tensor) -> Iterator[tuple[fx.Node, torch.Tensor]]:
    """All views of a node, and their values if that of the node is `value`."""
    for user in list(node.users):
        if ops.is_view(user) and user.args[0] is node:
            seen = _through(user, value)
            yield user, seen
            yield from _viewed(user, seen)


def _through(view: fx.Node, value: torch.Tensor) -> torch.Tensor:
    seen = view.target(value, *view.args[1:], **view.kwargs)  # type: ignore[operator]
    if not isinstance(seen, torch.Tensor):
        raise RuntimeError(f"{view.target} gives several views")
    return seen


def _last_of_inputs(node: fx.Node) -> fx.Node:
    """The node, or the last placeholder if it is one."""
    while node.op == "placeholder" and node.next.op == "placeholder":
        node = node.next
    return node
