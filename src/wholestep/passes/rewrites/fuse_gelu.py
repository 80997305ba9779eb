"""Fuses GELU into the matrix product before it, for devices whose library does both.

A linear layer, GELU in its tanh form, and the way back. Before and after::

    pre = aten.addmm(bias, x, up)                       hidden, pre = product_gelu(bias, x, up)
    hidden = aten.gelu(pre)
    ...                                          ->     ...
    grad = aten.mm(dy, down)                            grad = product_gelu_backward(dy, down, pre)
    grad = aten.gelu_backward(grad, pre)

The kernel of the activation goes, which reads and writes memory and computes next to nothing. A product adds up in
float32, and the activation, or its derivative times the gradient, is computed from the sums as they are: in half
precision they are rounded once less than eager code rounds them. What is kept for the backward is rounded as ever.
Either direction is rewritten without the other where only that one fits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
import torch.fx as fx
from torch import Tensor

from wholestep.ir import graph_edit, node_meta
from wholestep.ir.ops.library import LIBRARY
from wholestep.ir.program import Program, Stage
from wholestep.ir.sizes import are_same
from wholestep.passes.analysis.users import readers_through_views, view_chain

LIBRARY.define("product_gelu(Tensor bias, Tensor a, Tensor b) -> (Tensor, Tensor)")
LIBRARY.define("product_gelu_backward(Tensor a, Tensor b, Tensor pre) -> Tensor")


@torch.library.register_fake("wholestep::product_gelu", lib=LIBRARY)  # type: ignore[untyped-decorator,unused-ignore]
def _fake(bias: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    size = (a.shape[0], b.shape[1])
    return a.new_empty(size), a.new_empty(size)


@torch.library.register_fake("wholestep::product_gelu_backward", lib=LIBRARY)  # type: ignore[untyped-decorator,unused-ignore]
def _fake_backward(a: Tensor, b: Tensor, pre: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))


PRODUCT_GELU = torch.ops.wholestep.product_gelu.default
"""``gelu(pre)`` and ``pre = addmm(bias, a, b)``.

Takes a bias (n), a (rows, k) and b (k, n), all of one type; gives two tensors (rows, n) of that type, contiguous.
"""
PRODUCT_GELU_BACKWARD = torch.ops.wholestep.product_gelu_backward.default
"""``gelu_backward(mm(a, b), pre)``: the gradient of `pre`.

Takes a (rows, k), b (k, n) and pre (rows, n), contiguous, all of one type; gives (rows, n) of that type, contiguous.
"""

_aten = torch.ops.aten
_RESHAPES = frozenset({_aten.view.default, _aten._unsafe_view.default})
"""What a linear layer on more than two dimensions has around its product. Of a contiguous tensor the results are so."""


def fuse_gelu(program: Program, *, fuses: Callable[[fx.Node], bool]) -> Program:
    """The program with GELUs in the tanh form computed by the products whose results they take.

    `fuses` says of a product, ``addmm`` in the forward and ``mm`` in the backward, whether its device's library does.

    The note says how many activations those are, and how many gradients of activations.
    """
    if program.stage is Stage.SCHEDULED:
        return program
    graph = program.graph
    forward = [_fuse(graph, one, fuses) for one in _calls(graph, _aten.gelu.default)]
    backward = [_fuse_backward(graph, one, fuses) for one in _calls(graph, _aten.gelu_backward.default)]
    if not any(forward) and not any(backward):
        return program
    graph_edit.remove_dead_code(graph)
    return program.with_notes(
        f"{sum(forward)} activations and {sum(backward)} of their gradients are computed by the products before them"
    )


def _calls(graph: fx.Graph, target: Callable[..., object]) -> list[fx.Node]:
    found = graph.find_nodes(op="call_function", target=target)
    return [node for node in found if node.kwargs.get("approximate") == "tanh"]


def _fuse(graph: fx.Graph, gelu: fx.Node, fuses: Callable[[fx.Node], bool]) -> bool:
    """Puts `PRODUCT_GELU` in the place of an activation and its product; whether that can be."""
    *_, product = view_chain(gelu.all_input_nodes[0], _is_reshape)
    if not (_is_linear(product) and _sizes_are_known(gelu, product) and _is_only_activated(product) and fuses(product)):
        return False
    with graph.inserting_before(product):
        both = graph_edit.emit(graph, PRODUCT_GELU, *product.args, like=product)
        hidden = graph_edit.emit(graph, operator.getitem, both, 0, like=gelu)
        pre = graph_edit.emit(graph, operator.getitem, both, 1, like=product)
        hidden = _in_shape_of(graph, gelu, hidden)
    _replace(gelu, hidden)
    _replace(product, pre)
    return True


def _fuse_backward(graph: fx.Graph, gradient: fx.Node, fuses: Callable[[fx.Node], bool]) -> bool:
    """Puts `PRODUCT_GELU_BACKWARD` in the place of the gradient of an activation and the product before it; whether
    that can be."""
    given, activated = gradient.all_input_nodes[0], gradient.all_input_nodes[-1]
    *_, product = chain = list(view_chain(given, _is_reshape))
    if product.target is not _aten.mm.default or any(len(one.users) > 1 for one in chain):
        return False
    same = are_same(node_meta.tensor(given).shape, node_meta.tensor(activated).shape)
    if not _sizes_are_known(gradient, product) or not same:
        return False
    pre = _matrix(activated, product)
    if pre is None or not fuses(product):
        return False
    # Where the activation stood: what stands in between, sums for a bias, belongs to earlier kernels.
    with graph.inserting_before(gradient):
        new = graph_edit.emit(graph, PRODUCT_GELU_BACKWARD, *product.args, pre, like=gradient)
        new = _in_shape_of(graph, gradient, new)
    _replace(gradient, new)
    return True


def _is_reshape(node: fx.Node) -> bool:
    return node.target in _RESHAPES


def _is_linear(product: fx.Node) -> bool:
    """Whether the node is a product plus one number per column."""
    if product.target is not _aten.addmm.default or any(factor != 1 for factor in product.kwargs.values()):
        return False
    bias, *_ = product.all_input_nodes
    return are_same(node_meta.tensor(bias).shape, node_meta.tensor(product).shape[1:])


def _is_only_activated(product: fx.Node) -> bool:
    """Whether one activation, and gradients of activations, are all that read the result.

    Anybody else, a second activation in the backward that saves memory included, would see that the first one was not
    computed from the numbers that were kept.
    """
    found = list(readers_through_views(product, _is_reshape))
    gelus = [user for user, _ in found if user.target is _aten.gelu.default]
    others = [(user, seen) for user, seen in found if user not in gelus]
    return len(gelus) == 1 and all(
        user.target is _aten.gelu_backward.default and user.args[0] is not seen for user, seen in others
    )


def _matrix(activated: fx.Node, product: fx.Node) -> fx.Node | None:
    """What was activated, as a contiguous matrix like the product; None if it is not one."""
    wanted = node_meta.tensor(product)
    for node in view_chain(activated, _is_reshape):
        found = node_meta.tensor(node)
        if are_same(found.shape, wanted.shape) and found.dtype is wanted.dtype and found.is_contiguous():
            return node
    return None


def _sizes_are_known(*nodes: fx.Node) -> bool:
    return all(isinstance(size, int) for node in nodes for size in node_meta.tensor(node).shape)


def _in_shape_of(graph: fx.Graph, old: fx.Node, new: fx.Node) -> fx.Node:
    """The new value as readers of the old one expect it."""
    shape = node_meta.tensor(old).shape
    return (
        new
        if are_same(node_meta.tensor(new).shape, shape)
        else graph_edit.emit(graph, _aten.view.default, new, list(shape), like=old)
    )


def _replace(old: fx.Node, new: fx.Node) -> None:
    graph_edit.replace_node(old, new)
    graph_edit.renew_views(new)
