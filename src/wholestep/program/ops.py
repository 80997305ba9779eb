"""What wholestep knows about operators: aliasing, mutation, randomness, collectives. Asked by every stage."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import torch.fx as fx

c10d = torch.ops._c10d_functional

LIBRARY = torch.library.Library("wholestep", "DEF")
LIBRARY.define("gradient(Tensor grad, str name) -> Tensor")
LIBRARY.impl("gradient", lambda grad, name: grad.clone(), "CompositeExplicitAutograd")


@torch.library.register_fake("wholestep::gradient", lib=LIBRARY)  # type: ignore[untyped-decorator,unused-ignore]
def _fake_gradient(grad: torch.Tensor, name: str) -> torch.Tensor:
    return torch.empty_like(grad)


GRADIENT = torch.ops.wholestep.gradient.default
"""Marks the accumulated gradient of the parameter called `name`; placement consumes it, none is left after it."""

WAIT = c10d.wait_tensor.default
COLLECTIVES = frozenset({
    c10d.all_reduce.default, c10d.all_reduce_.default, c10d.all_gather_into_tensor.default,
    c10d.reduce_scatter_tensor.default, c10d.all_to_all_single.default, c10d.broadcast.default, c10d.broadcast_.default,
})  # fmt: skip
"""Collectives that start work; each is followed by a WAIT."""

# Aliases that the schema does not declare: the wait gives back the tensor it waited for.
_UNDECLARED_VIEWS = frozenset({WAIT, torch.ops.aten._unsafe_view.default})


def is_collective(node: fx.Node) -> bool:
    """Whether the node starts a collective."""
    return node.op == "call_function" and node.target in COLLECTIVES


def is_op(node: fx.Node) -> bool:
    """Whether the node calls a torch operator (and not, say, ``operator.getitem``)."""
    return node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)


@cache
def mutated_args(op: Any) -> tuple[int, ...]:
    """Positions of the arguments that the operator writes to."""
    if not isinstance(op, torch._ops.OpOverload):
        return ()
    arguments = op._schema.arguments
    return tuple(i for i, arg in enumerate(arguments) if arg.alias_info is not None and arg.alias_info.is_write)


@cache
def viewed_args(op: Any) -> tuple[int, ...]:
    """Positions of the arguments that the result may share memory with."""
    if op is operator.getitem or op in _UNDECLARED_VIEWS:
        return (0,)
    if not isinstance(op, torch._ops.OpOverload):
        return ()
    if not any(ret.alias_info is not None for ret in op._schema.returns):
        return ()
    return tuple(i for i, arg in enumerate(op._schema.arguments) if arg.alias_info is not None)


@cache
def is_random(op: Any) -> bool:
    """Whether the operator draws from, reads or sets a random generator. Such nodes keep their order."""
    if not isinstance(op, torch._ops.OpOverload):
        return False
    return torch.Tag.nondeterministic_seeded in op.tags or (op.namespace == "wholestep" and "rng" in op._schema.name)


_PROFILER = frozenset({"profiler::_record_function_enter_new", "profiler::_record_function_exit"})


@cache
def is_profiler(op: Any) -> bool:
    """Whether the operator only marks a range for the profiler."""
    name = op._schema.name if isinstance(op, torch._ops.OpOverload) else ""
    return name in _PROFILER or name.startswith("profiler::_record_function")


@cache
def has_effect(op: Any) -> bool:
    """Whether a call of the operator must stay although nobody reads its result."""
    if not isinstance(op, torch._ops.OpOverload) or is_profiler(op):
        return False
    # What gives nothing back was called for its effect: ``_assert_async``, a custom operator that logs.
    return bool(mutated_args(op)) or is_random(op) or not op._schema.returns


def written_by(op: Any, kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Positions of the arguments that a call of `op` writes to: `mutated_args`, less what the schema overstates.

    A fused optimizer writes to ``grads`` only to undo the scale of a GradScaler.
    """
    positions = mutated_args(op)
    if not positions or not op._schema.name.startswith("aten::_fused_") or kwargs.get("grad_scale") is not None:
        return positions
    return tuple(i for i in positions if op._schema.arguments[i].name != "grads")


_CHECKS_VALUES = frozenset({
    "embedding", "embedding_bag", "_embedding_bag", "index", "index_select", "index_put", "gather", "take", "scatter",
    "scatter_add", "scatter_reduce", "nll_loss_forward", "nll_loss2d_forward", "binary_cross_entropy", "multinomial",
    "one_hot", "_assert_async", "_linalg_check_errors", "linalg_cholesky_ex", "linalg_inv_ex", "_linalg_svd",
    "_linalg_eigh",
})  # fmt: skip
"""ATen operators that may refuse the values they get: an index out of range, a matrix without an inverse."""


@cache
def may_fail(op: Any) -> bool:
    """Whether a call with right shapes can still fail because of values, peers, or code that is not torch's."""
    if not isinstance(op, torch._ops.OpOverload):
        return False
    if op.namespace in ("aten", "prims", "wholestep"):
        return op._schema.name.split("::")[1] in _CHECKS_VALUES
    return not op._schema.name.startswith("wholestep_functional::aten__")


_registered: dict[Any, Any] = {}


def register_in_place(functional: Any, in_place: Any) -> None:
    """Tells that `in_place` writes to its first arguments what `functional` returns, in order."""
    _registered[functional] = in_place


@cache
def in_place_variant(op: Any) -> Any:
    """``aten.add_.Tensor`` for ``aten.add.Tensor``, ``_fused_adamw_`` for ``_fused_adamw``. None if there is none.

    Found by comparing schemas, so there is no table to keep: the name with an underscore, the same
    arguments by name and type, as many of them written to as the functional one returns, and nothing that
    changes a shape. The new value of the i-th argument written to is the i-th result of the functional one.
    """
    if op in _registered:
        return _registered[op]
    if not isinstance(op, torch._ops.OpOverload) or mutated_args(op) or viewed_args(op):
        return None
    packet = getattr(getattr(torch.ops, op.namespace), op._schema.name.split("::")[1] + "_", None)
    if packet is None or op._overloadname not in packet.overloads():
        return None
    twin = getattr(packet, op._overloadname)
    written = mutated_args(twin)
    if written != tuple(range(len(op._schema.returns))) or torch.Tag.inplace_view in twin.tags:
        return None
    ours = [(arg.name, str(arg.type)) for arg in op._schema.arguments]
    theirs = [(arg.name, str(arg.type)) for arg in twin._schema.arguments]
    return twin if written and ours == theirs else None
