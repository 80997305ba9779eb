"""Merges reductions of gradients into buckets: fewer, larger all-reduces, started while the backward runs.

Before and after, for gradients of one type that become ready in the order a, b::

    all_reduce(a * 0.5)                       flat = cat([reshape(a, [-1]), reshape(b, [-1])])
    all_reduce(b * 0.5)                ->     all_reduce(flat * 0.5)      # as soon as b is ready
    reader(wait(...), wait(...))              wait(...), split, views     # right before the first reader

The arithmetic is the same element by element: a product with 1/size, then the sum over the ranks.
Source of the idea and of filling buckets in the order in which gradients become ready: Li et al., "PyTorch
Distributed: Experiences on Accelerating Data Parallel Training", 2020.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx

from wholestep.program import edit, meta, ops, show
from wholestep.program.program import Program

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reduction:
    """One reduction of a gradient: ``wait(all_reduce(scale(grad)))``."""

    start: fx.Node
    waits: tuple[fx.Node, ...]
    grad: fx.Node
    """The gradient before it is scaled."""
    scale: float | None
    """1/size where gradients are averaged; None for a sum."""


def bucket(program: Program, *, cap_bytes: int) -> Program:
    """The program with its gradient reductions in buckets of at most `cap_bytes` bytes each.

    A gradient larger than that is a bucket of its own. Only reductions that placement has marked
    (`meta.bucket`) take part. Order of random operators: unchanged.
    """
    reductions = list(_reductions(program))
    if not reductions:
        return program
    groups = pack(
        [meta.num_bytes(one.grad) for one in reductions],
        [_key(one) for one in reductions],
        cap_bytes,
        needs=_needs(program.graph, reductions),
    )
    notes = []
    for index, group in enumerate(sorted(groups, key=lambda group: group.items[-1])):
        members = [reductions[item] for item in group.items]
        names = tuple(name for one in members for name in _bucket_of(one).members)
        record = meta.Bucket(index, names, group.num_bytes, group.reason)
        _merge(program.graph, members, record)
        notes.append(f"bucket {index}: {len(names)} gradients, {show.bytes_text(group.num_bytes)}; {group.reason}")
    edit.sort_topologically(program.graph)
    edit.remove_dead_code(program.graph)
    return program.with_notes(*notes)


def _reductions(program: Program) -> Iterator[_Reduction]:
    """The marked reductions, in the order in which they start, which is that of the gradients' readiness."""
    scales = {axis.group: 1 / axis.size for axis in program.mesh}
    for node in program.graph.find_nodes(op="call_function", target=ops.c10d.all_reduce.default):
        if meta.bucket(node) is None:
            continue
        grad, scale = node.args[0], None
        # Only the product that placement has put there: one of the user's own would split buckets by its factor.
        if grad.target is _aten.mul.Tensor and grad.args[1] == scales[node.args[-1]]:
            grad, scale = grad.args
        waits = tuple(user for user in node.users if user.target is ops.WAIT)
        yield _Reduction(start=node, waits=waits, grad=grad, scale=scale)


def _bucket_of(one: _Reduction) -> meta.Bucket:
    found = meta.bucket(one.start)
    assert found is not None  # `_reductions` has looked
    return found


def _key(one: _Reduction) -> Hashable:
    """Only reductions with the same key can share a bucket."""
    tensor = meta.tensor(one.grad)
    return (tensor.dtype, tensor.device, one.scale, one.start.args[1:])


def _needs(graph: fx.Graph, reductions: Sequence[_Reduction]) -> list[frozenset[int]]:
    """For each reduction, the earlier ones that must be over before it can start.

    Those are the ones its gradient is computed from. Besides: merging delays whoever reads a member, and a
    random operator must not be delayed past another one, so whatever a random operator, an effect or a collective
    of the user depends on has to be over before any later gradient is taken.
    """
    index_of = {wait: index for index, one in enumerate(reductions) for wait in one.waits}
    number_of = {one.start: index for index, one in enumerate(reductions)}
    masks: dict[fx.Node, int] = {}
    needs: list[frozenset[int]] = [frozenset()] * len(reductions)
    fence = 0
    for node in graph.nodes:
        mask = 1 << index_of[node] if node in index_of else 0
        for arg in node.all_input_nodes:
            mask |= masks[arg]
        masks[node] = mask
        theirs = ops.is_collective(node) and meta.bucket(node) is None
        if node.op == "call_function" and (theirs or ops.has_effect(node.target)):
            fence |= mask
        if node in number_of:
            needs[number_of[node]] = frozenset(_bits(mask | fence))
    return needs


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _merge(graph: fx.Graph, members: Sequence[_Reduction], record: meta.Bucket) -> None:
    """Makes one reduction of `members`, started where the last of them starts."""
    last = members[-1].start
    if len(members) == 1 and meta.tensor(members[0].grad).is_contiguous():
        meta.set_bucket(last, record)
        _delay_waits(graph, members[0])
        return
    with graph.inserting_before(last):
        flats = [_flatten(graph, one.grad) for one in members]
        flat = flats[0] if len(flats) == 1 else edit.emit(graph, _aten.cat.default, flats, like=last)
        scale = members[0].scale
        if scale is not None:
            flat = edit.emit(graph, _aten.mul.Tensor, flat, scale, like=last)
        start = edit.emit(graph, last.target, flat, *last.args[1:], like=last)  # type: ignore[arg-type]
        meta.set_bucket(start, record)
    with graph.inserting_before(_first_reader(graph, members, behind=last)):
        waited = edit.emit(graph, ops.WAIT, start, like=last)
        sizes = [meta.tensor(one.grad).numel() for one in members]
        parts = [waited]
        if len(members) > 1:
            split = edit.emit(graph, _aten.split_with_sizes.default, waited, sizes, like=last)
            parts = [edit.emit(graph, operator.getitem, split, index, like=last) for index in range(len(sizes))]
        views = [_unflatten(graph, part, one.grad) for part, one in zip(parts, members, strict=True)]
    for one, view in zip(members, views, strict=True):
        for wait in one.waits:
            edit.replace_node(wait, view)
        graph.erase_node(one.start)


def _delay_waits(graph: fx.Graph, one: _Reduction) -> None:
    reader = _first_reader(graph, [one], behind=one.start)
    for wait in one.waits:
        reader.prepend(wait)


def _first_reader(graph: fx.Graph, members: Sequence[_Reduction], *, behind: fx.Node) -> fx.Node:
    """The first node behind `behind` that reads a result; readers before it will be moved behind it."""
    readers = {user for one in members for wait in one.waits for user in wait.users}
    node = behind.next
    early = not readers or any(_before(reader, behind) for reader in readers)
    while not early and node not in readers and node.op != "output":
        node = node.next
    return node


def _before(a: fx.Node, b: fx.Node) -> bool:
    return bool(a < b)


def _flatten(graph: fx.Graph, grad: fx.Node) -> fx.Node:
    """The gradient as one dimension in the order of its memory: no copy where it is dense.

    ``reshape`` and not ``view``: should a kernel give other strides than its fake one, a copy is made.
    """
    order = _memory_order(meta.tensor(grad))
    if order is not None:
        grad = edit.emit(graph, _aten.permute.default, grad, order, like=grad)
    return edit.emit(graph, _aten.reshape.default, grad, [-1], like=grad)


def _unflatten(graph: fx.Graph, part: fx.Node, grad: fx.Node) -> fx.Node:
    """Undoes `_flatten`: the part of the bucket with the shape and the strides of the gradient."""
    tensor, order = meta.tensor(grad), _memory_order(meta.tensor(grad))
    if order is None:
        return edit.emit(graph, _aten.view.default, part, list(tensor.shape), like=grad)
    view = edit.emit(graph, _aten.view.default, part, [tensor.shape[dim] for dim in order], like=grad)
    back = [order.index(dim) for dim in range(len(order))]
    return edit.emit(graph, _aten.permute.default, view, back, like=grad)


def _memory_order(tensor: torch.Tensor) -> list[int] | None:
    """The order of dimensions in which the tensor is contiguous; None if it is so already, or in no order."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    return order if not tensor.is_contiguous() and tensor.permute(order).is_contiguous() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Items that share a bucket, by index in rising order, their bytes, and why no more of them do."""

    items: tuple[int, ...]
    num_bytes: int
    reason: str


FULL = "full: the next gradient would exceed the bound"
DEPENDS = "closed: the next gradient depends on the reduction of one in here"
END = "end: no gradient of this type is left"


def pack(
    sizes_bytes: Sequence[int],
    keys: Sequence[Hashable],
    cap_bytes: int,
    *,
    needs: Sequence[frozenset[int]] = (),
) -> list[Group]:
    """Puts items into groups, in order; an item joins the open group of its key or opens the next one.

    A group has items of one key and at most `cap_bytes` bytes, or a single item that is larger. `needs[i]`
    are the items that must be done before item i can start. Nothing in a group needs the group itself,
    also not by way of other groups, so the groups can be done one after another.
    Groups come in the order in which they are opened.
    """
    groups: list[list[int]] = []
    totals: list[int] = []
    reasons: list[str] = []
    opened: dict[Hashable, int] = {}
    group_of: list[int] = []
    behind: list[set[int]] = []  # the groups that each group needs, directly or by way of others
    for item, key in enumerate(keys):
        wanted = {group_of[other] for other in needs[item]} if needs else set()
        wanted = wanted.union(*(behind[group] for group in wanted))
        current = opened.get(key)
        if current is not None:
            reason = _why_close(current in wanted, totals[current] + sizes_bytes[item], cap_bytes)
            if reason:
                reasons[current], current = reason, None
        if current is None:
            current = opened[key] = len(groups)
            groups.append([])
            totals.append(0)
            reasons.append(END)
            behind.append(set())
        groups[current].append(item)
        totals[current] += sizes_bytes[item]
        group_of.append(current)
        behind[current] |= wanted
        for other in behind:
            if current in other:
                other |= behind[current]
    return [
        Group(items=tuple(items), num_bytes=total, reason=reason)
        for items, total, reason in zip(groups, totals, reasons, strict=True)
    ]


def _why_close(depends: bool, num_bytes: int, cap_bytes: int) -> str | None:
    if depends:
        return DEPENDS
    return FULL if num_bytes > cap_bytes else None
