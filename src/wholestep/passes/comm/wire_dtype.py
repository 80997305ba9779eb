"""Sends gradients that are half-precision products in half precision.

A weight that autocast has cast has a gradient of the small type, which is cast and reduced in float32. What is added is
the same if the cast comes after the journey, and half as many bytes go there. Before and after, of a bucket that holds
such gradients alone::

    mm = aten.mm(dy.t(), x)                   # bfloat16        mm = aten.mm.dtype(dy.t(), x, bfloat16)
    grad = aten._to_copy(mm, dtype=float32)                ->   flat = aten.cat([mm, ...])               # bfloat16
    flat = aten.cat([grad, ...])                                start = all_reduce_wide_by_copies(flat, "avg", float32)
    start = all_reduce_by_copies(flat, "avg")

Each gradient is rounded as eager code rounds it, and sums are float32, as those of DistributedDataParallel are.
Products write to their slice of the bucket (`grads_as_bucket_views`), half as many bytes as in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.fx as fx

from wholestep.ir import graph_edit, node_meta, printer
from wholestep.ir.ops.collectives import ALL_REDUCE_BY_COPIES, ALL_REDUCE_WIDE
from wholestep.ir.program import Program, Stage
from wholestep.passes.rewrites.matmul_out_dtype import Cast, match_cast_product, product_chain, set_out_dtype

_aten = torch.ops.aten

SupportsOutDtype = Callable[[fx.Node], bool]
"""Says of a product whether its device can make it in a type that is asked for."""


def narrow_dtype(grad: fx.Node, *, supports: SupportsOutDtype) -> torch.dtype | None:
    """The half precision of the product that a gradient is a cast of; None if it is none."""
    found = _cast(grad, supports)
    return None if found is None else node_meta.tensor(found.product).dtype


def narrow_wire_dtype(program: Program, *, supports: SupportsOutDtype) -> Program:
    """The program with buckets of such gradients sent in their half precision.

    The note says how many buckets those are, and how many bytes travel to be added.
    """
    if program.stage is Stage.SCHEDULED:
        return program
    graph, count, num_bytes = program.graph, 0, 0
    for start in graph.find_nodes(op="call_function", target=ALL_REDUCE_BY_COPIES):
        casts = [_cast(part, supports) for part in _members(start.args[0])]
        found = [one for one in casts if one is not None]
        types = {node_meta.tensor(one.product).dtype for one in found}
        if node_meta.bucket(start) is not None and len(found) == len(casts) and len(types) == 1:
            count, num_bytes = count + 1, num_bytes + _narrow(start, found, types.pop())
    if not count:
        return program
    graph_edit.remove_dead_code(graph)
    return program.with_notes(
        f"{count} buckets travel as their products are: {printer.bytes_text(num_bytes)} to be added"
    )


def _narrow(start: fx.Node, casts: list[Cast], dtype: torch.dtype) -> int:
    """Gives the bytes of the message."""
    for one in casts:
        set_out_dtype(dtype, one)
    flat, op, group = start.args
    assert isinstance(flat, fx.Node)
    if flat.target is _aten.cat.default:
        graph_edit.evaluate(flat)
    with start.graph.inserting_before(start):
        new = graph_edit.emit(start.graph, ALL_REDUCE_WIDE, flat, op, torch.float32, group, like=start)
    if (record := node_meta.bucket(start)) is not None:
        node_meta.set_bucket(new, record)
    graph_edit.replace_node(start, new)
    return node_meta.num_bytes(flat)


def _members(flat: fx.Node) -> list[fx.Node]:
    """What is put together, if it is for this alone."""
    return (
        list(graph_edit.nodes_of(flat.args[0])) if flat.target is _aten.cat.default and len(flat.users) == 1 else [flat]
    )


def _cast(grad: fx.Node, supports: SupportsOutDtype) -> Cast | None:
    """The cast of a product that a gradient is a view of, or is, if nothing else reads either."""
    chain = list(product_chain(grad))
    found = match_cast_product(chain[-1]) if all(len(one.users) == 1 for one in chain) else None
    return found if found is not None and supports(found.product) else None
