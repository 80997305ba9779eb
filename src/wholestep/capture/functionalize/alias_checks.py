"""Inputs that share memory: what a step may do to them.

A graph knows its inputs apart. Where two of them are views of one memory (gradients in a flat buffer, a weight and its
transpose), the graph would not see in one what it has written to the other, as eager code does. Nothing is lost while
neither is written to, or while one is used before the write to the other and not after it. All else is refused, as is
a list that a call writes to whose items use one another's memory: eager code goes through the list, and later items see
what was written for earlier ones; a graph computes all of them from what was there before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.fx as fx

from wholestep.errors import CaptureError
from wholestep.ir import node_meta, op_info
from wholestep.ir.dtensor.layouts import local_tensor
from wholestep.ir.dtensor.shards import is_dtensor


def overlaps(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Pairs of tensors, by place, that have bytes in common; the lower number first."""
    by_storage: dict[int, list[tuple[int, int, int]]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.layout is torch.strided and tensor.numel():
            start, stop = _span(tensor)
            by_storage.setdefault(tensor.untyped_storage()._cdata, []).append((start, stop, number))
    pairs = []
    for spans in by_storage.values():
        open_: list[tuple[int, int]] = []
        for start, stop, number in sorted(spans):
            open_ = [(end, other) for end, other in open_ if end > start]
            pairs += [(min(n, number), max(n, number)) for _, n in open_ if _intersect(tensors[n], tensors[number])]
            open_.append((stop, number))
    return sorted(pairs)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Bytes of its storage from the first that it has up to the last."""
    reach: int = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset())
    return start * tensor.element_size(), (start + reach + 1) * tensor.element_size()


def _intersect(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors whose spans meet share an element; even and odd columns do not."""
    if a.element_size() != b.element_size() or all(map(torch.ops.aten.is_non_overlapping_and_dense, (a, b))):
        return True
    last = max(_span(a)[1], _span(b)[1]) // a.element_size()
    marks = torch.zeros(last, dtype=torch.bool, device="cpu")
    marks.as_strided(a.shape, a.stride(), a.storage_offset()).fill_(True)
    return bool(marks.as_strided(b.shape, b.stride(), b.storage_offset()).any())


def check_writes(graph: fx.Graph, names: Sequence[str], live: Sequence[torch.Tensor]) -> None:
    """Checks what a traced graph writes to. Raises CaptureError with the user's line.

    `names`: of its placeholders, as far as they are tensors. `live`: what those stand for.
    """
    placeholders = graph.find_nodes(op="placeholder")[: len(names)]
    _check_inputs(graph, placeholders, names, _overlaps_of_shards(live))
    for node in graph.nodes:
        if clash := _written_and_used(node):
            _refuse_item(node, *clash, dict(zip(placeholders, names, strict=True)))


def _overlaps_of_shards(live: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Pairs in which one is a DTensor. A whole fake stands for it, which is in nobody's memory."""
    if not any(map(is_dtensor, live)):
        return []
    return [pair for pair in overlaps(list(map(local_tensor, live))) if any(is_dtensor(live[one]) for one in pair)]


def _check_inputs(
    graph: fx.Graph, placeholders: Sequence[fx.Node], names: Sequence[str], known: Sequence[tuple[int, int]]
) -> None:
    """Refuses a use of an input after a write to another one in the same memory. `known`: pairs that lie there."""
    tensors = [node_meta.tensor(node) for node in placeholders]
    partners: dict[int, set[int]] = {}
    for one, other in (*overlaps(tensors), *known):
        partners.setdefault(one, set()).add(other)
        partners.setdefault(other, set()).add(one)
    refused = {number: why for number, tensor in enumerate(tensors) if (why := _never_written(tensor))}
    if not partners and not refused:
        return
    roots = {node: {number} for number, node in enumerate(placeholders)}
    written: dict[int, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        writes = _reached(roots, op_info.argument_nodes(node, op_info.mutated_args(node.target)))
        if again := refused.keys() & writes:
            _refuse_write(node, names[min(again)], refused[min(again)])
        written.update(dict.fromkeys(writes & partners.keys(), node))
        for number in sorted(writes | _reached(roots, _read(node))):
            for other in sorted(partners.get(number, set()) & written.keys()):
                if written[other] is not node or number in writes:  # what a call only reads it reads before it writes
                    _refuse(node, names[number], names[other], written[other])
        if shared := _reached(roots, op_info.argument_nodes(node, op_info.viewed_args(node.target))):
            roots[node] = shared


def check_arrays(arrays: Iterable[tuple[str, Any]], written: Iterable[torch.Tensor]) -> None:
    """Raises CaptureError for an array on the memory of a tensor that the step writes to.

    Python looks at it while it runs, and a graph writes after that. `arrays`: with what a person would write for each.
    """
    bounds = [(path, _bounds(one)) for path, one in arrays]
    for tensor in written if bounds else ():
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.numel():
            continue
        start, stop = (tensor.untyped_storage().data_ptr() + one for one in _span(tensor))
        for path, (begin, end) in bounds:
            if begin < stop and start < end:
                raise CaptureError(
                    f"The step reads {path}, an array on the memory of a {list(tensor.shape)} that it writes to. A "
                    f"graph writes there when Python has looked at it. Copy the array, or read the tensor itself."
                )


def _bounds(thing: Any) -> tuple[int, int]:
    """Addresses from the first byte of a buffer up to the last."""
    array = thing if isinstance(thing, np.ndarray) else np.asarray(memoryview(thing))
    if not array.size:
        return 0, 0
    reach = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
    first = array.__array_interface__["data"][0]
    return first + sum(min(0, one) for one in reach), first + sum(max(0, one) for one in reach) + array.itemsize


def check_results(module: fx.GraphModule, count: int) -> None:
    """Raises CaptureError for a result, one of the first `count`, on the memory of an array: a graph gives a copy."""
    on_arrays: set[int] = set()
    for node in module.graph.find_nodes(op="get_attr"):
        held = getattr(module, node.target)
        if isinstance(held, torch.Tensor) and not held.untyped_storage().resizable():
            copies = (user for user in node.users if user.target is torch.ops.aten.lift_fresh_copy.default)
            on_arrays |= {node_meta.tensor(one).untyped_storage()._cdata for one in copies}
    results: tuple[object, ...] = module.graph.output_node().args[0][:count]  # type: ignore[index, assignment]
    for node in results if on_arrays else ():
        if isinstance(node, fx.Node) and any(
            one.untyped_storage()._cdata in on_arrays for one in node_meta.tensors(node)
        ):
            raise CaptureError(
                "The step returns a tensor on the memory of an array (torch.from_numpy, torch.as_tensor), which shows "
                "what is written to the array later. A graph would give a copy. Return it cloned, or the array."
            )


class _Use(NamedTuple):
    """One tensor among the arguments of a call."""

    node: fx.Node
    item: int | None  # its place in a list
    written: bool

    def disturbs(self, other: _Use) -> bool:
        """Whether eager code may see in the other what the call has written to this one."""
        return self.written and (other.written or (self.item is not None and self.item != other.item))


def _written_and_used(node: fx.Node) -> tuple[_Use, _Use] | None:
    """A tensor that a call writes to, and another argument of it that shares memory with that."""
    # What stands at the same place in another list is read before the write, as in `torch._foreach_add_(a, a)`.
    written = op_info.written_by(node.target, node.kwargs) if op_info.is_op(node) else ()
    if not written:
        return None
    uses: list[_Use] = []
    for place in range(len(op_info.argument_names(node.target))):
        value = op_info.argument(node, place)
        for item, one in enumerate(value) if isinstance(value, (list, tuple)) else [(None, value)]:
            if isinstance(one, fx.Node) and isinstance(node_meta.value(one), torch.Tensor):
                uses.append(_Use(one, item, place in written))
    if not any(use.written and use.item is not None for use in uses) and sum(use.written for use in uses) < 2:
        return None
    for a, b in overlaps([node_meta.tensor(use.node) for use in uses]):
        one, other = uses[a], uses[b]
        if one.disturbs(other) or other.disturbs(one):
            return (one, other) if one.disturbs(other) else (other, one)
    return None


def _reached(roots: Mapping[fx.Node, set[int]], nodes: Iterable[fx.Node]) -> set[int]:
    """The inputs whose memory some values live in."""
    return {number for node in nodes for number in roots.get(node, ())}


def _read(node: fx.Node) -> list[fx.Node]:
    """The arguments whose values a call reads."""
    # An input that is returned is returned as it is.
    if node.op == "output":
        return [one for one in node.all_input_nodes if one.op != "placeholder"]
    return [] if op_info.reads_no_values(node.target) else node.all_input_nodes


def _never_written(tensor: torch.Tensor) -> str:
    """Why a graph does not write to an input, as the end of a sentence; empty if it may."""
    if tensor.layout is not torch.strided:
        return (
            "a sparse tensor. A graph replaces such tensors and writes to none: clear gradients with zero_grad() "
            "before each backward, so that none is added to."
        )
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return (
            "an expanded tensor, of which several elements are one number in memory. Make it contiguous() before the "
            "step."
        )
    return ""


def _refuse(node: fx.Node, name: str, other: str, write: fx.Node) -> None:
    does = "the step returns" if node.op == "output" else f"{node.target} uses"
    where = f" at {node_meta.origin(node).source}" if node.op != "output" else ""
    behind = "with" if write is node else f"after the write at {node_meta.origin(write).source} to"
    raise CaptureError(
        f"The step could not be captured{where}\n{does} {name} {behind} {other}, and both share memory. A graph knows "
        f"its inputs apart and would not see in one what is written to the other. Give one of them memory of its own "
        f"(clone()), or have the step use only one of them."
    )


def _refuse_write(node: fx.Node, name: str, why: str) -> None:
    raise CaptureError(
        f"The step could not be captured at {node_meta.origin(node).source}\n{node.target} writes to {name}, {why}"
    )


def _refuse_item(node: fx.Node, written: _Use, other: _Use, names: Mapping[fx.Node, str]) -> None:
    def place_of(use: _Use) -> str:
        place = "an argument" if use.item is None else f"item {use.item} of a list"
        return f"{place} ({names[use.node]})" if use.node in names else place

    again = "writes to it again as" if other.written else "reads the same memory in"
    raise CaptureError(
        f"The step could not be captured at {node_meta.origin(node).source}\n{node.target} writes to "
        f"{place_of(written)} and {again} {place_of(other)}: one tensor twice, or views of one memory (tied weights of "
        f"two models, say). Eager code goes through its lists item by item and sees each write in the next item, a "
        f"graph takes all items as they were before the call. Give every tensor once (list(dict.fromkeys(tensors))), "
        f"read from a clone(), or make one call for each item."
    )
