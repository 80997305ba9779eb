"""Inputs that share memory: what a step may do to them.

A graph knows its inputs apart. Where two of them are views of one memory (gradients in a flat buffer, a weight and its
transpose), the graph would not see in one what it has written to the other, as eager code does. Nothing is lost while
neither is written to, or while one is used before the write to the other and not behind it. All else is refused, as is
one tensor twice in a list that a call writes to: eager code goes through the list, a graph has one result each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.fx as fx

from wholestep.errors import CaptureError
from wholestep.program import meta, ops


def overlaps(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Pairs of tensors, by place, that have bytes in common; the lower number first."""
    by_storage: dict[int, list[tuple[int, int, int]]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.layout is torch.strided and tensor.numel():
            start, stop = _span(tensor)
            by_storage.setdefault(tensor.untyped_storage()._cdata, []).append((start, stop, number))
    found = []
    for spans in by_storage.values():
        open_: list[tuple[int, int]] = []
        for start, stop, number in sorted(spans):
            open_ = [(end, other) for end, other in open_ if end > start]
            found += [(min(n, number), max(n, number)) for _, n in open_ if _meet(tensors[n], tensors[number])]
            open_.append((stop, number))
    return sorted(found)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Bytes of its storage from the first that it has up to the last."""
    reach: int = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset())
    return start * tensor.element_size(), (start + reach + 1) * tensor.element_size()


def _meet(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors whose spans meet have an element in common: even and odd columns have none."""
    if a.element_size() != b.element_size() or all(map(torch.ops.aten.is_non_overlapping_and_dense, (a, b))):
        return True
    last = max(_span(a)[1], _span(b)[1]) // a.element_size()
    marks = torch.zeros(last, dtype=torch.bool)
    marks.as_strided(a.shape, a.stride(), a.storage_offset()).fill_(True)
    return bool(marks.as_strided(b.shape, b.stride(), b.storage_offset()).any())


def check_writes(graph: fx.Graph, names: Sequence[str]) -> None:
    """Checks what a traced graph writes to. Raises CaptureError with the user's line.

    `names`: of its placeholders, as far as they are tensors.
    """
    for node in graph.nodes:
        targets = _arguments(node, ops.mutated_args(node.target))
        if len({*targets}) < len(targets):
            _refuse_twice(node)
    placeholders = graph.find_nodes(op="placeholder")[: len(names)]
    tensors = [meta.tensor(node) for node in placeholders]
    partners: dict[int, set[int]] = {}
    for one, other in overlaps(tensors):
        partners.setdefault(one, set()).add(other)
        partners.setdefault(other, set()).add(one)
    expanded = {number for number, tensor in enumerate(tensors) if _repeats_itself(tensor)}
    if not partners and not expanded:
        return
    roots = {node: {number} for number, node in enumerate(placeholders)}
    written: dict[int, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        writes = _reached(roots, _arguments(node, ops.mutated_args(node.target)))
        if again := expanded & writes:
            _refuse_expanded(node, names[min(again)])
        written.update(dict.fromkeys(writes & partners.keys(), node))
        for number in sorted(writes | _reached(roots, _read(node))):
            for other in sorted(partners.get(number, set()) & written.keys()):
                if written[other] is not node or number in writes:  # what a call only reads it reads before it writes
                    _refuse(node, names[number], names[other], written[other])
        if shared := _reached(roots, _arguments(node, ops.viewed_args(node.target))):
            roots[node] = shared


def _reached(roots: Mapping[fx.Node, set[int]], nodes: Iterable[fx.Node]) -> set[int]:
    """The inputs whose memory some values live in."""
    return {number for node in nodes for number in roots.get(node, ())}


def _read(node: fx.Node) -> list[fx.Node]:
    """The arguments whose values a call looks at. An input that is returned is returned as it is."""
    if node.op == "output":
        return [one for one in node.all_input_nodes if one.op != "placeholder"]
    return [] if ops.reads_no_values(node.target) else node.all_input_nodes


def _repeats_itself(tensor: torch.Tensor) -> bool:
    """Whether a tensor is expanded: several elements in one place."""
    if tensor.layout is not torch.strided:
        return False
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _arguments(node: fx.Node, places: Sequence[int]) -> list[fx.Node]:
    """The nodes in some arguments of a call, by their places in the schema."""
    found: list[fx.Node] = []
    for place in places:
        if place < len(node.args):
            fx.map_arg(node.args[place], found.append)
        elif ops.is_op(node):
            fx.map_arg(node.kwargs.get(node.target._schema.arguments[place].name), found.append)  # type: ignore[union-attr]
    return found


def _refuse(node: fx.Node, name: str, other: str, write: fx.Node) -> None:
    does = "the step returns" if node.op == "output" else f"{node.target} uses"
    where = f" at {meta.origin(node).source}" if node.op != "output" else ""
    behind = "with" if write is node else f"behind the write at {meta.origin(write).source} to"
    raise CaptureError(
        f"The step could not be captured{where}\n{does} {name} {behind} {other}, and both share memory. A graph knows "
        f"its inputs apart and would not see in one what is written to the other. Give one of them memory of its own "
        f"(clone()), or have the step use only one of them."
    )


def _refuse_expanded(node: fx.Node, name: str) -> None:
    raise CaptureError(
        f"The step could not be captured at {meta.origin(node).source}\n{node.target} writes to {name}, an expanded "
        f"tensor, of which several elements are one number in memory. Make it contiguous() before the step."
    )


def _refuse_twice(node: fx.Node) -> None:
    raise CaptureError(
        f"The step could not be captured at {meta.origin(node).source}\n{node.target} writes to one tensor twice in "
        f"one call: a parameter or a gradient stands in its list more than once (tied weights of two models, say). "
        f"Give it every tensor once: list(dict.fromkeys(tensors))."
    )
