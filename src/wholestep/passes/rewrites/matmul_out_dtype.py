"""Writes float32 gradients that are half-precision products in float32 at once.

A weight that autocast has cast has a gradient of the small type, which is cast back and put into its bucket. The
product adds up in float32 anyway. Before and after::

    mm = aten.mm(dy.t(), x)                   # bfloat16        mm = aten.mm.dtype(dy.t(), x, float32)
    grad = aten._to_copy(mm, dtype=float32)                ->   flat = aten.cat([mm, ...])
    flat = aten.cat([grad, ...])

and `grads_as_bucket_views` lets the product write to its slice of the bucket. A cast of a gradient reads and writes 6
bytes per element, which go. The gradient is rounded once less than eager code rounds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.fx as fx

from wholestep.ir import graph_edit, node_meta, op_info
from wholestep.ir.program import Program, Stage
from wholestep.ir.sizes import are_same, is_same
from wholestep.passes.analysis.users import view_chain

_aten = torch.ops.aten
WIDE = _aten.mm.dtype
"""A product with a result of another type than its factors."""


def widen_matmul_out_dtype(program: Program, *, widens: Callable[[fx.Node], bool]) -> Program:
    """The program with casts of weight gradients to float32 left to their products.

    `widens` says of a product whether its device can. That is done for buckets of which such gradients are at least
    half, since `grads_as_bucket_views` leaves others as they are. The note says how many products those are, and the
    bytes of casts that are not read and written.
    """
    if program.stage is Stage.SCHEDULED:
        return program
    graph = program.graph
    casts_of: dict[fx.Node, list[Cast]] = {}
    for node in graph.find_nodes(op="call_function", target=_aten._to_copy.default):
        cast, bucket = match_cast_product(node), _bucket(node)
        if cast is not None and bucket is not None and widens(cast.product):
            casts_of.setdefault(bucket, []).append(cast)
    chosen = [one for bucket, casts in casts_of.items() if _are_half(casts, bucket) for one in casts]
    if not chosen:
        return program
    saved_bytes = sum(3 * one.num_bytes // 2 for one in chosen)
    for one in chosen:
        set_out_dtype(torch.float32, one)
    graph_edit.remove_dead_code(graph)
    return program.with_notes(f"{len(chosen)} weight gradients are products in float32: no casts of {saved_bytes:,} B")


@dataclass(frozen=True, slots=True)
class Cast:
    """A cast to float32 of a product in half precision, in the layout that it has."""

    node: fx.Node
    chain: list[fx.Node]
    """What is cast: views, from the last to the first, and the product. Nobody else reads them."""

    @property
    def product(self) -> fx.Node:
        """The product."""
        return self.chain[-1]

    @property
    def num_bytes(self) -> int:
        """Bytes of the result."""
        return node_meta.num_bytes(self.node)


def match_cast_product(node: fx.Node) -> Cast | None:
    """The node as such a cast; None if it is none."""
    if node.target is not _aten._to_copy.default:
        return None
    chain = list(product_chain(node.all_input_nodes[0]))
    alone = all(len(one.users) == 1 for one in chain)
    return Cast(node, chain) if alone and _is_cast_product(node, chain[-1]) else None


def set_out_dtype(dtype: torch.dtype, cast: Cast) -> None:
    """Puts the product as one with a result in `dtype`, and its views, in the place of the cast."""
    graph, (*views, product) = cast.node.graph, cast.chain
    with graph.inserting_before(product):
        new = graph_edit.emit(graph, WIDE, *product.args, dtype, like=product)
        for view in reversed(views):
            new = graph_edit.emit(graph, view.target, new, *view.args[1:], like=view, **view.kwargs)  # type: ignore[arg-type]
    graph_edit.replace_node(cast.node, new)
    graph_edit.renew_views(new)


def _are_half(casts: list[Cast], bucket: fx.Node) -> bool:
    return 2 * sum(one.num_bytes for one in casts) >= node_meta.num_bytes(bucket)


def product_chain(node: fx.Node) -> Iterator[fx.Node]:
    """The node, what it is a view of, and so on; a product that is written as `WIDE` ends it."""
    return view_chain(node, lambda one: op_info.is_view(one) and one.target is not WIDE)


def _is_cast_product(cast: fx.Node, product: fx.Node) -> bool:
    """Whether the cast takes a whole half-precision product to float32 in its layout."""
    if product.target is not _aten.mm.default or cast.kwargs.get("memory_format") is not None:
        return False
    made, taken, given = node_meta.tensor(product), node_meta.tensor(cast.all_input_nodes[0]), node_meta.tensor(cast)
    small = made.dtype in (torch.bfloat16, torch.float16) and given.dtype is torch.float32
    same = is_same(taken.numel(), made.numel()) and are_same(taken.stride(), given.stride())
    same = same and given.device == made.device
    return small and same


def _bucket(grad: fx.Node) -> fx.Node | None:
    """The bucket that a gradient goes into and nowhere else, as its reduction is given it."""
    if len(grad.users) != 1:
        return None
    user = next(iter(grad.users))
    if op_info.is_collective(user):
        return grad if node_meta.bucket(user) is not None else None
    passes_on = op_info.is_view(user) or user.target in (_aten.cat.default, _aten.mul.Tensor)
    return _bucket(user) if passes_on else None


def is_mostly_wide(cat: fx.Node) -> bool:
    """Whether at least half the bytes of a ``cat`` are products that can write them there."""
    if cat.target is not _aten.cat.default:
        return False
    parts = list(graph_edit.nodes_of(cat.args[0]))
    own = sum(node_meta.num_bytes(part) for part in parts if list(product_chain(part))[-1].target is WIDE)
    return own > 0 and 2 * own >= node_meta.num_bytes(cat)
