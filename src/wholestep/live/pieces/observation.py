"""One call that is executed for the first time: what it gives, and what it does besides."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from wholestep.capture.wrappers import ddp
from wholestep.ir.dtensor.shards import is_sharded
from wholestep.live.opaque.functions import acts_on_parameters
from wholestep.live.opaque.modules import OpaqueModule
from wholestep.live.pieces.tensors import TensorTable
from wholestep.live.recording.handle import Handle, execute
from wholestep.live.recording.observer import Observer
from wholestep.live.recording.path import BACKWARDS
from wholestep.live.recording.record import (
    SETS_REQUIRES_GRAD,
    VALUE,
    Key,
    Operand,
    OutputMeta,
    Record,
    Value,
    is_constant,
    name_of,
)
from wholestep.live.recording.snapshot import OptimizerSnapshot
from wholestep.live.recording.structure import LEAF, Structure, flatten
from wholestep.util.freed_graphs import freed_graphs
from wholestep.util.gradient_node import gradient_node, is_leaf


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What a call was seen to do."""

    result: Any
    results: list[Any]
    """The leaves of it, then arguments and other tensors that are in a graph since then and none of these."""
    known_as: list[Value | None]
    """The values that they were before."""
    structure: Structure
    reads: bool
    """Whether it gave something else than plain tensors of known shapes."""
    drawn: tuple[torch.Generator, ...]
    """The generators of which it has drawn."""
    is_pointwise: bool
    joined: list[torch.Tensor]
    """Arguments that it has written to, and that are in a graph since then."""
    joins: tuple[int, ...]
    """Leaves of those that it has not returned."""
    brought: list[torch.Tensor]
    """Tensors that are none of its arguments, on the memory of those, and in a graph since then."""
    changes_kind: bool
    """Whether an argument has another shape or type after it."""
    frozen: list[tuple[torch.Tensor, bool]]
    """Parameters that it has frozen or thawed, with what they had of ``requires_grad`` before."""
    written: list[torch.Tensor]
    """Arguments that it has written to."""
    writes_to: tuple[Operand, ...]
    """All that the run knows on the memory of those."""
    writes_grads: bool
    """Whether arguments have other gradients after it, or what it has written to is on the memory of gradients."""
    frees: frozenset[Value]
    """Of a backward: the values that somebody holds and whose graph is freed after it."""
    reduces: frozenset[int]
    """Of a backward: ids of the parameters whose gradients wrappers have reduced in it."""
    state: OptimizerSnapshot | None
    """Of the optimizer that it has stepped, after the step."""

    def record(self, key: Key, leaves: Sequence[Any], line: str, num_externals: int) -> Record:
        """The record of the call, made with these leaves of arguments at a line of the user's."""
        metas = [
            None if one is None else OutputMeta.of(one, leaves, self.joined, known)
            for one, known in zip(self.results, self.known_as, strict=True)
        ]
        first = len(metas) - len(self.brought)
        brings = tuple(known for known in self.known_as[first:] if known is not None)
        return Record(
            key, (*metas[:first], *(one and replace(one, views=None, again=None) for one in metas[first:])),
            self.structure, drawn=self.drawn, line=line,
            state_entries=0 if self.state is None else self.state.num_entries,
            writes=tuple(number for number, leaf in enumerate(leaves) if any(leaf is one for one in self.written)),
            writes_to=self.writes_to, writes_grads=self.writes_grads, frees=self.frees,
            reduces=self.reduces, joins=self.joins, brings=brings, num_externals=num_externals,
            is_pointwise=self.is_pointwise,
        )  # fmt: skip


def observe(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    leaves: Sequence[Any],
    earlier: tuple[TensorTable, Sequence[Record]],
) -> Observation:
    """Executes a call with these leaves of arguments. `earlier`: tensors and records of the run so far."""
    tensors, records = earlier
    observer, kinds, contents, grads = Observer(), _kinds(leaves), _contents(leaves), _grads(leaves)
    optimizer, awaited = next((leaf for leaf in leaves if isinstance(leaf, Optimizer)), None), ddp.awaited()
    with observer if optimizer is None else nullcontext():  # optimizers of torch read numbers of their own
        result = execute(function, args, kwargs)
    returned, structure = flat_result(function, result)
    joined = [leaf for leaf, kind in kinds if _has_joined(function, leaf, kind)]
    joins = tuple(n for n, leaf in enumerate(leaves) if _is_in(leaf, joined) and not _is_in(leaf, returned))
    written = [leaf for leaf, version, values in contents if _is_written(leaf, version, values)]
    writes_to = tensors.on_memory_of(written)
    brought = _brought(writes_to, leaves, tensors, records) if joined else []
    results = [*returned, *(leaves[n] for n in joins), *brought]
    return Observation(
        result=result, results=results, structure=structure,
        known_as=_known_as(results, tensors, len(records)),
        reads=observer.reads or not (_has_no_dict(structure) and all(_is_plain(one, leaves) for one in returned)),
        drawn=tuple(observer.drawn), is_pointwise=observer.is_pointwise and optimizer is None,
        joined=joined, joins=joins, brought=brought,
        changes_kind=any(
            _kind(leaf) != kind and not _is_in(leaf, joined) and not _is_frozen(function, leaf, kind)
            for leaf, kind in kinds
        ),
        frozen=[(leaf, kind[-1]) for leaf, kind in kinds if _is_frozen(function, leaf, kind)],
        written=written, writes_to=writes_to,
        writes_grads=_writes_grads(function, results, grads) or tensors.is_gradient(written),
        frees=freed_graphs(tensors.alive()) if function in BACKWARDS else frozenset(),
        reduces=awaited - ddp.awaited() if function in BACKWARDS else frozenset(),
        state=None if optimizer is None else OptimizerSnapshot.of(optimizer),
    )  # fmt: skip


def flat_result(function: Any, result: Any) -> tuple[list[Any], Structure]:
    """The leaves of what a call has given, and what they stand in."""
    if isinstance(function, OpaqueModule):
        return pytree.tree_flatten(result)
    results: list[Any] = []
    structure = flatten(result, results)
    return results, structure


def _is_plain(result: Any, leaves: Sequence[Any]) -> bool:
    """Whether a record can hold a result: a new tensor, nothing, or what the call was given, such as a parameter."""
    if type(result) is nn.Parameter and any(result is leaf for leaf in leaves):
        return True
    return result is None or (type(result) is torch.Tensor and result.layout is torch.strided)


def _has_no_dict(structure: Structure) -> bool:
    if structure is LEAF or isinstance(structure, pytree.TreeSpec):
        return True
    return structure[0] is not dict and all(map(_has_no_dict, structure[-1]))


def _kinds(leaves: Sequence[Any]) -> list[tuple[torch.Tensor, Any]]:
    return [(leaf, _kind(leaf)) for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _kind(tensor: torch.Tensor) -> Any:
    """What a call in place may change of an argument besides its numbers, whether it requires grad last."""
    memory = (tensor.stride(), tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else None
    return tensor.shape, tensor.dtype, memory, tensor.requires_grad


def _has_joined(function: Any, tensor: torch.Tensor, kind: Any) -> bool:
    """Whether a tensor of this kind is in a graph now, or was told to ask for a gradient, and that is all."""
    asks = function in SETS_REQUIRES_GRAD and type(tensor) is torch.Tensor
    return (asks or gradient_node(tensor) is not None) and (*kind[:-1], kind[-1] is False) == _kind(tensor)


def _is_frozen(function: Any, tensor: torch.Tensor, kind: Any) -> bool:
    """Whether a call has frozen a parameter of this kind, or thawed it, and that is all."""
    is_parameter = type(tensor) is nn.Parameter and is_leaf(tensor)
    return function in SETS_REQUIRES_GRAD and is_parameter and _kind(tensor) == (*kind[:-1], not kind[-1])


def _known_as(results: Sequence[Any], tensors: TensorTable, number: int) -> list[Value | None]:
    """The values that results were before: of earlier calls, or of this one where it gives a tensor twice."""
    found: list[Value | None] = []
    places: dict[int, int] = {}
    for output, one in enumerate(results):
        known = tensors.value_of(one) if isinstance(one, torch.Tensor) else None
        found.append((number, places[id(one)]) if id(one) in places else known)
        if isinstance(one, torch.Tensor):
            places[id(one)] = output
    return found


def _brought(
    writes_to: Sequence[Operand], leaves: Sequence[Any], tensors: TensorTable, records: Sequence[Record]
) -> list[torch.Tensor]:
    """What a call that wrote there has put into a graph, and was not given: a view brings what it views."""
    found = []
    for kind, key, detail in writes_to:
        tensor = tensors.tensor_of((key, detail)) if kind == VALUE else tensors.externals[key]
        meta = records[key].outputs[detail] if kind == VALUE else None
        was_in_graph = meta is not None and meta.requires_grad
        if not was_in_graph and gradient_node(tensor) is not None and not _is_in(tensor, leaves):
            found.append(tensor)
    return found


def _is_in(tensor: torch.Tensor, tensors: Sequence[Any]) -> bool:
    return any(tensor is one for one in tensors)


def _grads(leaves: Sequence[Any]) -> list[tuple[torch.Tensor, tuple[int, int]]]:
    """The leaves of the graph with their gradients."""
    return [(leaf, _grad(leaf)) for leaf in leaves if isinstance(leaf, torch.Tensor) and is_leaf(leaf)]


def _writes_grads(function: Any, results: Sequence[Any], grads: Sequence[tuple[torch.Tensor, tuple[int, int]]]) -> bool:
    """Whether a call has changed gradients of its arguments, or would, like ``zero_grad()`` where there were none."""
    if any(is_leaf(one) and _grad(one) != was for one, was in grads):
        return True
    gives_nothing = function not in (*BACKWARDS, *SETS_REQUIRES_GRAD) and all(one is None for one in results)
    return gives_nothing and any(one.requires_grad for one, _ in grads)


def _grad(leaf: torch.Tensor) -> tuple[int, int]:
    """A gradient by identity and version."""
    return id(leaf.grad), 0 if leaf.grad is None else leaf.grad._version


def _contents(leaves: Sequence[Any]) -> list[tuple[torch.Tensor, int, torch.Tensor | None]]:
    """The tensors of a call with their versions, and of those without gradients their values.

    Norms write to their running statistics without counting a version.
    """
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_inference()]
    return [(leaf, leaf._version, None if leaf.requires_grad else leaf.detach().clone()) for leaf in tensors]


def _is_written(tensor: torch.Tensor, version: int, values: torch.Tensor | None) -> bool:
    return tensor._version != version or (values is not None and not torch.equal(tensor, values))


def unknown_argument(function: Any, leaves: Sequence[Any], tensors: TensorTable) -> str:
    """Why a call is not determined by its arguments as a record holds them; empty if it is."""
    if function is torch.Tensor.retain_grad:  # C++ holds its tensor weakly then, which cannot be exchanged any more
        return "retain_grad leaves a hook on its tensor"
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if type(leaf) not in (torch.Tensor, Handle, nn.Parameter):
                if is_sharded(leaf) and is_leaf(leaf) and acts_on_parameters(function, leaves):
                    continue
                return f"{name_of(function)} is given a {type(leaf).__name__}"
            if leaf.layout is not torch.strided:
                return f"{name_of(function)} is given a sparse tensor"
            value = tensors.value_of(leaf)
            if type(leaf) is not Handle and gradient_node(leaf) is not None and value is None:
                return f"{name_of(function)} is given a tensor whose graph began before the step"
            if (value is not None or leaf.requires_grad) and tensors.is_exposed(leaf):
                return f"{name_of(function)} is given a tensor whose memory an array of yours shares"
        elif not isinstance(leaf, float) and not is_constant(leaf):
            return f"{name_of(function)} is given a {type(leaf).__name__}"
    return ""


def hooks_on_gradients(function: Any, tensors: TensorTable) -> str:
    """Hooks are Python that runs in the backward, so it cannot run after the step."""
    if function in BACKWARDS and any(one._backward_hooks or _grad_hooks(one) for one in tensors.loose):
        return "a parameter or an input has hooks on its gradient"
    return ""


def _grad_hooks(tensor: torch.Tensor) -> Any:
    return is_leaf(tensor) and tensor._post_accumulate_grad_hooks
