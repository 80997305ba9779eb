"""A tensor becomes a part of a wider one: who reads it as it lies there, and who a copy.

Rows of such a part stand further apart than they are long. What computes number by number, or along rows or columns,
does not mind, if what it gives keeps the layout that the rest of the program was captured with. Views are made anew. A
copy that lies as the tensor did is for all others: results of the step, messages, random numbers, which go by places in
memory, views that rows in one piece alone have, and kernels that may want their tensors so, which fake ones do not say.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from wholestep.ir import graph_edit, node_meta, op_info
from wholestep.ir.sizes import are_same, is_same
from wholestep.passes.analysis.users import readers_through_views, view_chain
from wholestep.passes.rewrites.fuse_cross_entropy import CROSS_ENTROPY

_aten = torch.ops.aten
_READ_ROWS = frozenset({
    CROSS_ENTROPY,
    _aten._log_softmax.default, _aten._log_softmax_backward_data.default, _aten._softmax.default,
    _aten._softmax_backward_data.default, _aten._to_copy.default, _aten.addmm.default, _aten.amax.default,
    _aten.amin.default, _aten.argmax.default, _aten.argmin.default, _aten.bmm.default, _aten.cat.default,
    _aten.clone.default, _aten.constant_pad_nd.default, _aten.gather.default, _aten.index.Tensor,
    _aten.linalg_vector_norm.default, _aten.logsumexp.default, _aten.max.default, _aten.max.dim, _aten.mean.default,
    _aten.mean.dim, _aten.min.default, _aten.min.dim, _aten.mm.default, _aten.native_layer_norm.default,
    _aten.native_layer_norm_backward.default, _aten.sum.default, _aten.sum.dim_IntList, _aten.var_mean.correction,
})  # fmt: skip
"""Operators that read rows wherever they stand, besides those that compute number by number."""
_BY_PLACES = frozenset({_aten.as_strided.default, _aten._reshape_alias.default})
"""Views that are told places in memory."""
_RESHAPES = frozenset({_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default})


def readers_that_fit(node: fx.Node, sliced: torch.Tensor) -> dict[fx.Node, bool]:
    """By reader of a node, whether it may be given `sliced` in the place of its value."""
    views: dict[fx.Node, dict[fx.Node, Any]] = {}
    for user in node.users:
        try:
            views[user] = _views(user, {node: sliced})
        except (RuntimeError, ValueError):  # other columns are in the way; fake tensors say so by a ValueError
            continue
    while True:  # who reads two such views gives what depends on both
        values = {node: sliced} | {view: value for found in views.values() for view, value in found.items()}
        ends = {
            user: [end for end, _ in readers_through_views(user)] if found else [user] for user, found in views.items()
        }
        fit = {user: found for user, found in views.items() if all(_stays(end, values) for end in ends[user])}
        if len(fit) == len(views):
            return {user: user in fit for user in node.users}
        views = fit


def replace_readers(node: fx.Node, sliced: fx.Node, fit: Mapping[fx.Node, bool]) -> None:
    """Lets readers read `sliced` where they fit, and else a contiguous copy of it."""
    for user, fits in fit.items():
        if fits:
            user.replace_input_with(node, sliced)
    graph_edit.renew_views(sliced)
    if all(fit.values()):
        return
    with node.graph.inserting_after(sliced):
        copy = graph_edit.emit(
            node.graph, _aten.clone.default, sliced, memory_format=torch.contiguous_format, like=node
        )
    for user, fits in fit.items():
        if not fits:
            user.replace_input_with(node, copy)
    graph_edit.renew_views(copy)


def leading_slice(wide: fx.Node, shape: torch.Size) -> fx.Node:
    """The first rows and columns of a matrix, right after it."""
    graph, sliced = wide.graph, wide
    for dim, size in enumerate(shape):
        if not is_same(node_meta.tensor(sliced).shape[dim], size):
            with graph.inserting_after(sliced):
                sliced = graph_edit.emit(graph, _aten.slice.Tensor, sliced, dim, 0, size, like=wide)
    return sliced


def through_reshapes(matrix: fx.Node) -> fx.Node:
    """The first matrix of which this one is reshapes there and back."""
    shape = node_meta.tensor(matrix).shape
    chain = view_chain(matrix, lambda node: node.target in _RESHAPES)
    return [node for node in chain if are_same(node_meta.tensor(node).shape, shape)][-1]


def _views(user: fx.Node, values: Mapping[fx.Node, Any]) -> dict[fx.Node, Any]:
    """The values of a view, and views of it, where other nodes give `values`; empty for no view."""
    if not op_info.is_view(user):
        return {}
    if user.target in _BY_PLACES:
        raise ValueError(f"{user.target} is told places in memory")
    found = {user: _value(user, values)}
    for reader in user.users:
        found |= _views(reader, found)
    return found


def _stays(reader: fx.Node, values: Mapping[fx.Node, Any]) -> bool:
    """Whether a call may read such values and keeps the layout of its result."""
    if not op_info.is_op(reader) or op_info.has_effect(reader.target):
        return False
    by_number = torch.Tag.pointwise in reader.target.tags or op_info.reads_no_values(reader.target)  # type: ignore[union-attr]
    if not by_number and reader.target not in _READ_ROWS:
        return False
    recorded = list(node_meta.tensors(reader))
    if not all(isinstance(size, int) for one in recorded for size in one.shape):
        return False
    try:
        found = list(node_meta.tensors_in(_value(reader, values)))
    except (RuntimeError, ValueError):
        return False
    return list(map(_layout, found)) == list(map(_layout, recorded))


def _layout(one: torch.Tensor) -> tuple[object, ...]:
    return one.shape, one.stride(), one.dtype


def _value(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """What a call gives where other nodes give `values`."""

    def given(arg: Any) -> Any:
        return (values[arg] if arg in values else node_meta.value(arg)) if isinstance(arg, fx.Node) else arg

    args, kwargs = pytree.tree_map(given, (node.args, node.kwargs))
    if node.target is operator.getitem:
        return args[0][args[1]]
    with node_meta.fake_mode(node.graph), torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]
