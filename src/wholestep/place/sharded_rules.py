"""Which operators run on parts of tensors, and how. Each rule gives None where its operator has to see whole tensors.

Padding stays what it is: after operators that go by number it may hold anything, and no rule lets it reach a value.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx

from wholestep.ir import node_meta, op_info
from wholestep.ir.program import ShardSpec
from wholestep.ir.sizes import is_same
from wholestep.place.layouts import LazyView, NormOfShard, Unreduced
from wholestep.place.sharded_placer import ShardedPlacer, computes_whole

_aten = torch.ops.aten

_BY_NUMBER = frozenset({
    _aten.clone.default, _aten.detach.default, _aten.alias.default, _aten._to_copy.default, _aten.lerp.Scalar,
    _aten.lerp.Tensor, _aten.addcdiv.default, _aten.addcmul.default, _aten.zeros_like.default, _aten.empty_like.default,
    _aten.ones_like.default, _aten.full_like.default, _aten.lift_fresh_copy.default, _aten.zero.default,
    _aten.fill.Scalar, _aten.fill.Tensor, _aten.masked_fill.Tensor,
})  # fmt: skip
"""Operators that take tensors number by number and do not say so by torch's tag."""
_SAME = frozenset({_aten.detach.default, _aten.alias.default})


class RulePlacer(ShardedPlacer):
    """The placer with the rules of data parallel on parts."""

    def sharded_rule(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """The first rule that takes the node; None where none does."""
        for rule in (_of_list, _accumulated, _view, _copied, _number_by_number, _each_index, _norm, _stacked_norms):
            made = rule(self, node, args, kwargs)
            if made is not None:
                return made
        return None


def _of_list(placer: ShardedPlacer, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """An item of a list whose items have layouts of their own."""
    if node.target is not operator.getitem:
        return None
    listed = placer.layout(args[0])
    return placer.on_shards(node, args, kwargs, listed[args[1]]) if isinstance(listed, list) else None


def _accumulated(placer: ShardedPlacer, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """A gradient of this rank added to one that was reduced before: it is reduced alone, and added then."""
    if node.target in _SAME and isinstance(args[0], Unreduced):
        return args[0]
    if node.target is not _aten.add.Tensor or kwargs or len(args) != 2 or not computes_whole(node):
        return None
    old, new = args
    if isinstance(old, Unreduced) and placer.layout(new) is None:
        return Unreduced(old.reduced, old.spec, placer.emit(_aten.add.Tensor, old.local, new, like=node))
    spec = placer.layout(old)
    is_gradient = isinstance(spec, ShardSpec) and isinstance(old, fx.Node) and placer.is_entry_gradient(old)
    return Unreduced(old, spec, new) if is_gradient and placer.layout(new) is None else None


def _view(placer: ShardedPlacer, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """A view of a parameter is made where it is read."""
    if not op_info.is_view(node) or node.target in _SAME or node.target is operator.getitem:
        return None
    return LazyView(args[0], node) if isinstance(placer.layout(args[0]), (ShardSpec, LazyView)) else None


def _copied(placer: ShardedPlacer, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """``copy(old, new)`` is `new` in the type of `old`."""
    if node.target is not _aten.copy.default:
        return None
    old, new = node.args[:2]
    assert isinstance(old, fx.Node)
    assert isinstance(new, fx.Node)
    spec = placer.layout(args[1])
    if not isinstance(spec, ShardSpec) or not spec.is_whole(node_meta.tensor(old).shape):
        return None
    dtype = node_meta.tensor(old).dtype
    if dtype == node_meta.tensor(new).dtype:
        return args[1]
    made = placer.emit(_aten._to_copy.default, args[1], like=node, dtype=dtype)
    placer.layouts[made] = spec
    return made


def _number_by_number(placer: ShardedPlacer, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Pointwise operators on parts that are cut alike; of whole tensors among them, this rank's shard."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or op_info.is_random(target):
        return None
    if torch.Tag.pointwise not in target.tags and target not in _BY_NUMBER and target is not _aten.copy.default:
        return None
    tensors = [one for one in node.all_input_nodes if isinstance(node_meta.value(one), torch.Tensor)]
    spec = _one_spec(placer, tensors)
    if spec is None or not spec.is_whole(node_meta.tensor(node).shape):
        return None
    if not all(_fits(placer, one, spec) for one in tensors):
        return None
    if computes_whole(node) and any(placer.layout(placer.values[one]) is None for one in tensors):
        return None  # what is whole may differ from rank to rank
    taken = {one: _operand(placer, one, spec) for one in tensors}
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda one: taken.get(one, placer.values[one]))
    return placer.on_shards(node, args, kwargs, spec)


def _each_index(placer: ShardedPlacer, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Operators on lists of tensors: every index on its own, if what stands there is cut alike."""
    if not op_info.is_indexwise(node.target):
        return None
    results = node_meta.value(node)
    count = len(results[0]) if isinstance(results[0], (list, tuple)) else len(results)
    lists: list[Any] = [one for one in (*node.args, *node.kwargs.values()) if _is_list_of(one, count)]
    if not lists:
        return None
    specs: list[ShardSpec | None] = []
    cut: dict[fx.Node, ShardSpec] = {}
    for index in range(count):
        here: list[fx.Node] = [one[index] for one in lists]
        spec = _one_spec(placer, here)
        if spec is None and any(placer.is_cut(placer.values[one]) for one in here):
            return None
        specs.append(spec)
        if spec is not None and not all(_fits(placer, one, spec) and cut.setdefault(one, spec) == spec for one in here):
            return None
    if _is_norm(node):
        return _norms_of_shards(placer, node, specs)
    if computes_whole(node):
        return None
    return _on_lists(placer, node, specs, {one: _operand(placer, one, spec) for one, spec in cut.items()})


def _on_lists(placer: ShardedPlacer, node: fx.Node, specs: list[Any], changed: dict[fx.Node, Any]) -> fx.Node:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda one: changed.get(one, placer.values[one]))
    results = node_meta.value(node)

    def of(items: Any) -> list[Any]:
        if len(items) != len(specs):  # of an option that is not in use, such as amsgrad
            return [None] * len(items)
        return [
            spec if spec is not None and spec.is_whole(item.shape) else None
            for item, spec in zip(items, specs, strict=True)
        ]

    return placer.on_shards(
        node, args, kwargs, [of(one) for one in results] if isinstance(results[0], (list, tuple)) else of(results)
    )


def _norm(placer: ShardedPlacer, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """The norm of all of a tensor is one of its shard, combined where it is read."""
    if node.target is not _aten.linalg_vector_norm.default or not isinstance(placer.layout(args[0]), ShardSpec):
        return None
    given = op_info.by_name(node.target, args, kwargs)
    order = float(given.get("ord", 2))
    if given.get("dim") is not None or given.get("keepdim") or order <= 0:
        return None
    valid = placer.valid(args[0], placer.layout(args[0]))
    return placer.on_shards(node, (valid, *args[1:]), kwargs, NormOfShard(order))


def _norms_of_shards(placer: ShardedPlacer, node: fx.Node, specs: list[Any]) -> Any:
    order = float(node.args[1]) if len(node.args) > 1 else 2.0  # type: ignore[arg-type]
    if order <= 0:
        return None
    listed: Any = node.args[0]
    tensors = [placer.values[one] for one in listed]
    valid = [one if spec is None else placer.valid(one, spec) for one, spec in zip(tensors, specs, strict=True)]
    rest = fx.node.map_arg((node.args[1:], node.kwargs), lambda one: placer.values[one])
    layout = [None if one is None else NormOfShard(order) for one in specs]
    return placer.on_shards(node, (valid, *rest[0]), rest[1], layout)


def _stacked_norms(placer: ShardedPlacer, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Norms of parts side by side, as clipping has them: one reduction for all."""
    if node.target is not _aten.stack.default or kwargs or len(args) > 1:
        return None
    items = list(args[0])
    found = [(place, placer.layout(one)) for place, one in enumerate(items) if placer.layout(one) is not None]
    orders = {layout.order for _, layout in found if isinstance(layout, NormOfShard)}
    if len(orders) != 1 or not all(isinstance(layout, NormOfShard) for _, layout in found):
        return None
    combined = placer.combined_norms([items[place] for place, _ in found], orders.pop())
    for (place, _), norm in zip(found, combined, strict=True):
        items[place] = norm
    return placer.emit(node.target, items, like=node)


def _is_norm(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name == "aten::_foreach_norm"


def _is_list_of(one: Any, count: int) -> bool:
    if not isinstance(one, (list, tuple)) or len(one) != count:
        return False
    return all(isinstance(item, fx.Node) and isinstance(node_meta.value(item), torch.Tensor) for item in one)


def _one_spec(placer: ShardedPlacer, nodes: list[fx.Node]) -> ShardSpec | None:
    """How those of some old values are cut that are, if they are cut alike."""
    found = [layout for one in nodes if (layout := placer.layout(placer.values[one])) is not None]
    is_one = bool(found) and all(isinstance(one, ShardSpec) and one == found[0] for one in found)
    return found[0] if is_one and not any(isinstance(placer.values[one], Unreduced) for one in nodes) else None


def _fits(placer: ShardedPlacer, old: fx.Node, spec: ShardSpec) -> bool:
    """Whether an operand can stand beside parts cut by `spec`."""
    layout, shape = placer.layout(placer.values[old]), tuple(node_meta.tensor(old).shape)
    return layout == spec or (layout is None and (spec.is_whole(shape) or _is_along(shape, spec)))


def _operand(placer: ShardedPlacer, old: fx.Node, spec: ShardSpec) -> Any:
    """The operand beside parts cut by `spec`."""
    value, shape = placer.values[old], tuple(node_meta.tensor(old).shape)
    is_same = placer.layout(value) == spec or (_is_along(shape, spec) and not spec.is_whole(shape))
    return value if is_same else placer.own_shard(value, spec)


def _is_along(shape: tuple[int, ...], spec: ShardSpec) -> bool:
    """Whether a whole operand is the same for every number along the dim that is cut."""
    from_end = len(spec.whole_shape) - spec.dim
    return len(shape) < from_end or is_same(shape[len(shape) - from_end], 1)
