"""How values of a placed graph lie on the ranks, and the nodes that bring one layout into another.

A value without a layout is whole on every rank: the same everywhere, or, as activations are, each rank's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.fx as fx

from wholestep.ir import node_meta, op_info
from wholestep.ir.node_meta import Bucket, BucketKind
from wholestep.ir.program import MeshAxis, ShardSpec

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class NormOfShard:
    """The norm of this rank's part of a tensor: no norm of the whole one before it is combined over the ranks."""

    order: float


@dataclass(frozen=True, slots=True)
class LazyView:
    """A view of a sharded value. It is made where it is read, of what is gathered there."""

    base: Any
    """The sharded value, or another view."""
    node: fx.Node
    """The view in the old graph."""


@dataclass(frozen=True, slots=True)
class Unreduced:
    """The sum of a part that is reduced already and of a gradient of this rank, which is whole and is not."""

    reduced: fx.Node
    spec: ShardSpec
    local: fx.Node


Layout = ShardSpec | NormOfShard
Layouts = Layout | list[Any] | None
"""Of a value; of a call that gives lists, in lists."""


class Emitter(Protocol):
    """What adds nodes to the graph that is written."""

    def emit(self, target: Any, *args: Any, like: fx.Node, **kwargs: Any) -> fx.Node:
        """Adds a call."""
        ...


def gather(out: Emitter, shard: fx.Node, spec: ShardSpec, axis: MeshAxis, bucket: Bucket) -> fx.Node:
    """The whole tensor, of the parts of all ranks."""
    sent = _contiguous(out, shard)
    start = out.emit(op_info.c10d.all_gather_into_tensor.default, sent, spec.num_ranks, axis.group, like=shard)
    node_meta.set_bucket(start, bucket)
    whole = out.emit(op_info.WAIT, start, like=shard)
    if spec.dim:  # parts lie one after another along the first dim
        apart = out.emit(_aten.view.default, whole, [spec.num_ranks, *spec.shard_shape], like=shard)
        order = [*range(1, spec.dim + 1), 0, *range(spec.dim + 1, len(spec.shard_shape) + 1)]
        beside = out.emit(_aten.permute.default, apart, order, like=shard)
        whole = out.emit(_aten.reshape.default, beside, list(_padded_shape(spec)), like=shard)
    if spec.padding:
        whole = out.emit(_aten.slice.Tensor, whole, spec.dim, 0, spec.whole_shape[spec.dim], like=shard)
    return whole


def gathered_rows(out: Emitter, rows: fx.Node, axis: MeshAxis) -> fx.Node:
    """The rows of all ranks, one rank's after another's. Every rank has as many."""
    sent = out.emit(_aten.clone.default, rows, like=rows, memory_format=torch.contiguous_format)
    start = out.emit(op_info.c10d.all_gather_into_tensor.default, sent, axis.size, axis.group, like=rows)
    return out.emit(op_info.WAIT, start, like=rows)


def reduce_scatter(out: Emitter, whole: fx.Node, spec: ShardSpec, axis: MeshAxis, name: str) -> fx.Node:
    """This rank's part of the sum over the ranks. `name`: of the parameter whose gradient it is."""
    message = padded(out, whole, spec)
    if spec.dim:
        order = [spec.dim, *(dim for dim in range(len(spec.shard_shape) + 1) if dim != spec.dim)]
        apart = out.emit(_aten.permute.default, _split(out, message, spec), order, like=whole)
        rows = [spec.num_ranks * spec.shard_shape[0], *spec.shard_shape[1:]]
        message = out.emit(_aten.reshape.default, apart, rows, like=whole)
    message = _contiguous(out, message)
    start = out.emit(
        op_info.c10d.reduce_scatter_tensor.default, message, "sum", spec.num_ranks, axis.group, like=whole
    )  # fmt: skip
    node_meta.set_bucket(
        start, Bucket(0, (name,), node_meta.num_bytes(message), node_meta.UNBUCKETED, kind=BucketKind.SCATTER)
    )
    return out.emit(op_info.WAIT, start, like=whole)


def _contiguous(out: Emitter, message: fx.Node) -> fx.Node:
    """A message as collectives take it: NCCL sends its bytes in the order of memory; gloo copies, or refuses it."""
    if node_meta.tensor(message).is_contiguous():
        return message
    return out.emit(_aten.clone.default, message, like=message, memory_format=torch.contiguous_format)


def own_shard(out: Emitter, whole: fx.Node, spec: ShardSpec, rank: fx.Node) -> fx.Node:
    """This rank's part of a value that is the same on every rank. A view, unless it has to be padded."""
    return out.emit(_aten.select.int, _split(out, padded(out, whole, spec), spec), spec.dim, rank, like=whole)


def padded(out: Emitter, whole: fx.Node, spec: ShardSpec) -> fx.Node:
    """The whole tensor with zeros at the end of the dim that is cut, so that all parts have one length."""
    if not spec.padding:
        return whole
    later = len(spec.whole_shape) - spec.dim - 1
    return out.emit(_aten.constant_pad_nd.default, whole, [0, 0] * later + [0, spec.padding], like=whole)


def _split(out: Emitter, message: fx.Node, spec: ShardSpec) -> fx.Node:
    """With a dim more, that of the ranks, before the one that is cut."""
    shape = [*spec.whole_shape[: spec.dim], spec.num_ranks, *spec.shard_shape[spec.dim :]]
    target = _aten.view.default if node_meta.tensor(message).is_contiguous() else _aten.reshape.default
    return out.emit(target, message, shape, like=message)


def _padded_shape(spec: ShardSpec) -> tuple[int, ...]:
    return (
        *spec.whole_shape[: spec.dim], spec.shard_length * spec.num_ranks, *spec.whole_shape[spec.dim + 1 :]
    )  # fmt: skip
