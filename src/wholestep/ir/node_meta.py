"""Typed reading and writing of node metadata: the only file that knows the keys of ``node.meta``."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from wholestep.errors import InternalError
from wholestep.ir.sizes import hint

_VALUE = "val"  # torch's own key, shared with Inductor
_ORIGIN = "wholestep.origin"
_BUCKET = "wholestep.bucket"
_POSITION = "wholestep.position"
_STANDS_FOR = "wholestep.stands_for"
_REPEATS = "wholestep.repeats"


class Region(enum.Enum):
    """Which part of the step a node comes from."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"  # forward work done again inside the backward (activation checkpointing)
    OPTIMIZER = "optimizer"
    OTHER = "other"  # after the backward and outside an optimizer: clipping, averages, metrics


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a node comes from: part of the step, module (fully qualified name), the user's ``file.py:line``."""

    region: Region
    module: str = ""
    source: str = ""


class BucketKind(enum.Enum):
    """What a collective of the strategy does with its bucket."""

    REDUCE = "reduce"  # gradients, summed over the ranks
    SCATTER = "scatter"  # gradients, summed, of which every rank gets its part
    GATHER = "gather"  # parts of parameters or of other sharded values, of which every rank gets the whole


@dataclass(frozen=True, slots=True)
class Bucket:
    """What one collective of the strategy carries: gradients or parameters, by name, and its size in bytes."""

    index: int
    members: tuple[str, ...]
    num_bytes: int
    reason: str
    """Why the bucket ends where it does."""
    orders: tuple[tuple[int, ...] | None, ...] = field(default=(), compare=False)
    """Per member, the order of dimensions in which its gradient lies in the bucket; None is their own order."""
    as_rows: bool = False
    """Whether the one gradient is the table of an embedding, of which the rows travel that were looked up."""
    kind: BucketKind = BucketKind.REDUCE
    phase: str = ""
    """The part of the step that a GATHER is for, such as "forward": the same parameter may be gathered in several."""
    share: float = field(default=1.0, compare=False)
    """Bytes that travel as a share of those of a reduction in the type of the gradients."""


UNKNOWN = Origin(Region.OTHER)
COMPUTING_PHASES = frozenset({Region.FORWARD.value, Region.BACKWARD.value})
"""Phases of gathers that are read by the computation of the phase; the others bring what nobody in the step reads."""
UNBUCKETED = "not bucketed yet"
"""The reason of a reduction that stands for one gradient as it was placed."""
ALIGNMENT_BYTES = 16
"""Where memory begins at a multiple of it, libraries of matrix products compute as in memory of its own. Elsewhere MKL
takes other kernels, which round differently, and cuBLAS slower ones."""


def value(node: fx.Node) -> Any:
    """The fake tensor, symbolic number or list of them that the node gives; None where there is none."""
    return node.meta.get(_VALUE)


def set_value(node: fx.Node, new: Any) -> None:
    """Records what the node gives."""
    node.meta[_VALUE] = new


def tensor(node: fx.Node) -> torch.Tensor:
    """The fake tensor that the node gives. Raises InternalError where it is not one tensor."""
    found = value(node)
    if not isinstance(found, torch.Tensor):
        raise InternalError(f"node {node.name} ({node.target}) gives {type(found).__name__}, not a tensor")
    return found


def tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    """Every fake tensor that the node gives: none, one, or those in its list, or in its lists."""
    return tensors_in(value(node))


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a nest of lists and tuples."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for one in tree:
            yield from tensors_in(one)


def num_bytes(node: fx.Node) -> int:
    """Bytes of every tensor that the node gives, with sizes that move as they were in the traced call. One whose size
    is data counts as nothing."""
    return sum(hint(one.numel()) * one.element_size() for one in tensors(node))


def origin(node: fx.Node) -> Origin:
    """Where the node comes from."""
    found: Origin = node.meta.get(_ORIGIN, UNKNOWN)
    return found


def set_origin(node: fx.Node, new: Origin) -> None:
    """Records where the node comes from."""
    node.meta[_ORIGIN] = new


def bucket(node: fx.Node) -> Bucket | None:
    """The bucket that a collective carries, where the node is the reduction of gradients."""
    return node.meta.get(_BUCKET)


def set_bucket(node: fx.Node, new: Bucket) -> None:
    """Records the bucket that a collective carries."""
    node.meta[_BUCKET] = new


def is_prefetchable(node: fx.Node) -> bool:
    """Whether the node gathers what forward or backward read: it may start early, at the price of memory."""
    record = bucket(node)
    return record is not None and record.kind is BucketKind.GATHER and record.phase in COMPUTING_PHASES


def brings_gradients(node: fx.Node) -> bool:
    """Whether the node reduces gradients, as a bucket or alone."""
    record = bucket(node)
    return record is not None and record.kind is not BucketKind.GATHER


def stands_for(node: fx.Node) -> str:
    """The name of the functional call that an in-place call has replaced; else the node's own name."""
    return str(node.meta.get(_STANDS_FOR, node.name))


def set_stands_for(node: fx.Node, name: str) -> None:
    """Records which call the node has replaced."""
    node.meta[_STANDS_FOR] = name


def repeats(node: fx.Node) -> str | None:
    """The name of the call of the forward that this one does again to save memory; None where it does none again."""
    return node.meta.get(_REPEATS)


def set_repeats(node: fx.Node, name: str) -> None:
    """Records which call the node does again."""
    node.meta[_REPEATS] = name


def position(node: fx.Node) -> int | None:
    """The place of the node in the order of the step as written, once a schedule has moved it."""
    return node.meta.get(_POSITION)


def set_position(node: fx.Node, new: int) -> None:
    """Records the place of the node in the order of the step as written."""
    node.meta[_POSITION] = new


def copy_meta(source: fx.Node, target: fx.Node) -> None:
    """Gives `target` the metadata of `source`."""
    target.meta = dict(source.meta)


def portable(node: fx.Node) -> dict[str, Any]:
    """The metadata that a program needs in another process: all that this file knows."""
    return {key: item for key, item in node.meta.items() if key == _VALUE or key.startswith("wholestep.")}


def fake_mode(graph: fx.Graph) -> FakeTensorMode:
    """The fake mode that the values of the graph live in. Raises InternalError in a graph without tensors."""
    for node in graph.nodes:
        for one in tensors(node):
            if isinstance(one, FakeTensor):
                return one.fake_mode
    raise InternalError("a graph without fake values: it was not made by capture")
