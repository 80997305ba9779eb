"""Facts about operators: aliasing, mutation, randomness, collectives."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.fx as fx

from wholestep.ir.ops.collectives import (
    ALL_GATHER_INTO,
    ALL_REDUCE_BY_COPIES,
    ALL_REDUCE_BY_COPIES_,
    ALL_REDUCE_ROWS,
    ALL_REDUCE_ROWS_,
    ALL_REDUCE_WIDE,
    BARRIER,
    EXCHANGE,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
)
from wholestep.ir.ops.library import LIBRARY
from wholestep.ir.ops.packed_scalars import element
from wholestep.ir.segment import Segment

c10d = torch.ops._c10d_functional

LIBRARY.define("gradient(Tensor grad, str name) -> Tensor")
LIBRARY.impl("gradient", lambda grad, name: grad.clone(), "CompositeExplicitAutograd")


@torch.library.register_fake("wholestep::gradient", lib=LIBRARY)  # type: ignore[untyped-decorator,unused-ignore]
def _fake_gradient(grad: torch.Tensor, name: str) -> torch.Tensor:
    return torch.empty_like(grad)


GRADIENT = torch.ops.wholestep.gradient.default
"""Marks the accumulated gradient of the parameter called `name`; placement consumes it, none is left after it."""

LIBRARY.define("resize_storage(Tensor self, SymInt num_bytes) -> Tensor")
LIBRARY.define("resize_storage_(Tensor(a!) self, SymInt num_bytes) -> Tensor(a!)")
LIBRARY.define("version(Tensor self) -> SymInt")
LIBRARY.define("set_version(Tensor self, SymInt version) -> ()")


def _resize_storage_(self: torch.Tensor, num_bytes: int) -> torch.Tensor:
    self.untyped_storage().resize_(num_bytes)
    return self


def _resized(self: torch.Tensor, num_bytes: int) -> torch.Tensor:
    made = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device=self.device)
    return _resize_storage_(made, num_bytes)


LIBRARY.impl("resize_storage_", _resize_storage_, "CompositeExplicitAutograd")
LIBRARY.impl("resize_storage", _resized, "CompositeExplicitAutograd")
LIBRARY.impl("version", lambda self: self._version, "CompositeExplicitAutograd")
LIBRARY.impl(
    "set_version",
    lambda self, version: torch._C._autograd._unsafe_set_version_counter((self,), (version,)),
    "CompositeExplicitAutograd",
)
# A fake tensor keeps its memory: who shares it with whom is read from it, and the size it has is asked of the node.
torch.library.register_fake("wholestep::resize_storage_", lambda self, num_bytes: self, lib=LIBRARY)
torch.library.register_fake(
    "wholestep::resize_storage",
    lambda self, num_bytes: torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device=self.device),
    lib=LIBRARY,
)
torch.library.register_fake(
    "wholestep::version", lambda self: self.fake_mode.shape_env.create_unbacked_symint(), lib=LIBRARY
)
torch.library.register_fake("wholestep::set_version", lambda self, version: None, lib=LIBRARY)

RESIZE_STORAGE = torch.ops.wholestep.resize_storage.default
"""``x`` with a storage of `num_bytes` bytes: 0 frees it, the bytes of ``x`` allocate it. Contents are undefined."""
RESIZE_STORAGE_ = torch.ops.wholestep.resize_storage_.default
"""The same, done to ``x`` itself."""
VERSION = torch.ops.wholestep.version.default
"""The version counter that autograd keeps of an input, as the step finds it."""
SET_VERSION = torch.ops.wholestep.set_version.default
"""Sets the version counter of an input, after the last write to it."""

WAIT = c10d.wait_tensor.default
COLLECTIVES = frozenset({
    c10d.all_reduce.default, c10d.all_reduce_.default, c10d.all_gather_into_tensor.default,
    c10d.reduce_scatter_tensor.default, c10d.all_to_all_single.default, c10d.broadcast.default, c10d.broadcast_.default,
    c10d.all_reduce_coalesced.default, c10d.all_reduce_coalesced_.default,
    c10d.all_gather_into_tensor_coalesced.default, c10d.reduce_scatter_tensor_coalesced.default,
    REDUCE, REDUCE_SCATTER, GATHER, SCATTER, EXCHANGE, ALL_REDUCE_BY_COPIES, ALL_REDUCE_BY_COPIES_, ALL_REDUCE_WIDE,
    ALL_REDUCE_ROWS, ALL_REDUCE_ROWS_, ALL_GATHER_INTO,
})  # fmt: skip
"""Collectives that start work; each of their results is followed by a WAIT."""

SYMMETRIC = frozenset({
    c10d.all_reduce.default, c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default,
    c10d.all_to_all_single.default, REDUCE_SCATTER, ALL_REDUCE_BY_COPIES, ALL_REDUCE_WIDE, ALL_REDUCE_ROWS,
})  # fmt: skip
"""Collectives to which every rank gives a value that counts: equal ones on one rank are equal on all."""

# Aliases that the schema does not declare: the wait gives back the tensor it waited for.
_UNDECLARED_VIEWS = frozenset({WAIT, torch.ops.aten._unsafe_view.default})


def is_collective(node: fx.Node) -> bool:
    """Whether the node starts a collective."""
    return node.op == "call_function" and node.target in COLLECTIVES


def waits(node: fx.Node) -> list[fx.Node]:
    """The waits of a collective: of its result, or of each of its results."""
    readers = [user for one in node.users for user in (one.users if one.target is operator.getitem else [one])]
    return [reader for reader in readers if reader.target is WAIT]


def waited_for(wait: fx.Node) -> fx.Node:
    """The node that started what `wait` waits for."""
    source = wait.args[0]
    while isinstance(source, fx.Node) and source.target is operator.getitem:
        source = source.args[0]
    assert isinstance(source, fx.Node)  # a wait takes a tensor
    return source


def frees_storage(node: fx.Node) -> bool:
    """Whether the node gives its tensor back without memory."""
    return node.target in (RESIZE_STORAGE, RESIZE_STORAGE_) and node.args[1:] == (0,)


def is_op(node: fx.Node) -> bool:
    """Whether the node calls a torch operator (and not, say, ``operator.getitem``)."""
    return node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)


def writes_into_copy(op: Any) -> bool:
    """Whether an operator gives a copy of its first argument with a part written: ``x[0] = y`` without the write."""
    return isinstance(op, torch._ops.OpOverload) and op._schema.name.endswith("_scatter")


@cache
def argument_names(op: Any) -> tuple[str, ...]:
    """The arguments that an operator's schema declares, in order."""
    return tuple(arg.name for arg in op._schema.arguments)


def by_name(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What a call of an operator is given, by the names in its schema. What is left out is absent."""
    return dict(zip(argument_names(op), args, strict=False)) | dict(kwargs)


def argument(node: fx.Node, place: int) -> Any:
    """What a call is given for the argument at a place of its schema; None where it is left out."""
    if place < len(node.args):
        return node.args[place]
    return node.kwargs.get(argument_names(node.target)[place]) if is_op(node) else None


def argument_nodes(node: fx.Node, places: Iterable[int]) -> list[fx.Node]:
    """The nodes in some arguments of a call, those in lists as well."""
    found: list[fx.Node] = []
    for place in places:
        fx.map_arg(argument(node, place), found.append)
    return found


@cache
def mutated_args(op: Any) -> tuple[int, ...]:
    """Positions of the arguments that the operator writes to."""
    if isinstance(op, Segment):
        return tuple(argument for argument, _ in op.stored)
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
def gives_first(op: Any) -> bool:
    """Whether an operator writes to its first argument and gives it, with the shape that it had."""
    if not isinstance(op, torch._ops.OpOverload) or torch.Tag.inplace_view in op.tags:
        return False
    given, returns = op._schema.arguments[:1], op._schema.returns
    aliases = [one.alias_info for one in (*given, *returns)]
    return len(aliases) == 2 and all(one is not None and one.is_write for one in aliases)


def is_view(node: fx.Node) -> bool:
    """Whether the node gives the memory of its argument seen in another way, an item of such views, or one number."""
    if node.target is element:
        return True
    if node.op != "call_function" or node.target is WAIT or mutated_args(node.target):
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and is_view(source)
    return bool(viewed_args(node.target)) and len(node.all_input_nodes) == 1


_READS_SHAPE_ONLY = frozenset({
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_empty",
    "new_zeros", "new_ones", "new_full", "new_empty_strided", "sym_size", "sym_stride", "sym_numel",
    "sym_storage_offset",
})  # fmt: skip


@cache
def reads_no_values(op: Any) -> bool:
    """Whether a call looks at nothing of its tensors but shape, type and place: a view, ``zeros_like``, a version."""
    if op is operator.getitem or op in (VERSION, SET_VERSION):
        return True
    if not isinstance(op, torch._ops.OpOverload) or mutated_args(op):
        return False
    return bool(viewed_args(op)) or op._schema.name.split("::")[1] in _READS_SHAPE_ONLY


@cache
def is_random(op: Any) -> bool:
    """Whether the operator draws from, reads or sets a random generator. Such nodes keep their order."""
    if not isinstance(op, torch._ops.OpOverload):
        return False
    return torch.Tag.nondeterministic_seeded in op.tags or (op.namespace == "wholestep" and "rng" in op._schema.name)


def only_computes(op: Any) -> bool:
    """Whether a call gives what its arguments say and does nothing else: it sends and draws nothing, and is no operator
    of the user's, which may do anything."""
    if not isinstance(op, torch._ops.OpOverload):
        return True
    return op.namespace in ("aten", "prims", "wholestep") and op not in COLLECTIVES and not is_random(op)


_QUIET_ATTENTION = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    )
    if hasattr(torch.ops.aten, name)
)  # fmt: skip
"""Operators that draw random numbers only where they are given a probability of dropout."""


def draws(node: fx.Node) -> bool:
    """Whether a call is `is_random` with the arguments that it has: attention without dropout is not."""
    if not is_random(node.target):
        return False
    quiet = node.target in _QUIET_ATTENTION
    return not quiet or by_name(node.target, node.args, node.kwargs).get("dropout_p", 0.0) != 0.0


_PROFILER = frozenset({"profiler::_record_function_enter_new", "profiler::_record_function_exit"})


@cache
def is_profiler(op: Any) -> bool:
    """Whether the operator only marks a range for the profiler."""
    name = op._schema.name if isinstance(op, torch._ops.OpOverload) else ""
    return name in _PROFILER or name.startswith("profiler::_record_function")


@cache
def has_effect(op: Any) -> bool:
    """Whether a call of the operator must stay although nobody reads its result."""
    if isinstance(op, Segment):
        return bool(op.stored)
    if not isinstance(op, torch._ops.OpOverload) or is_profiler(op):
        return False
    # What gives nothing back was called for its effect: ``_assert_async``, a custom operator that logs.
    return bool(mutated_args(op)) or is_random(op) or not op._schema.returns


def written_by(op: Any, kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Positions of the arguments that a call of `op` writes to: `mutated_args`, less what the schema overstates.

    A fused optimizer writes to ``grads`` only to undo the scale of a GradScaler.
    """
    positions = mutated_args(op)
    if (
        not positions
        or isinstance(op, Segment)
        or not op._schema.name.startswith("aten::_fused_")
        or kwargs.get("grad_scale") is not None
    ):
        return positions
    return tuple(i for i in positions if op._schema.arguments[i].name != "grads")


_CHECKS_VALUES = frozenset({
    "embedding", "embedding_bag", "_embedding_bag", "index", "index_select", "index_put", "gather", "take", "scatter",
    "scatter_add", "scatter_reduce", "nll_loss_forward", "nll_loss2d_forward", "binary_cross_entropy", "multinomial",
    "one_hot", "_assert_async", "_linalg_check_errors", "linalg_cholesky_ex", "linalg_inv_ex", "_linalg_svd",
    "_linalg_eigh", "check",
})  # fmt: skip
"""Operators that may refuse the values they get: an index out of range, a matrix without an inverse."""

_NEEDS_PEERS = frozenset({REDUCE, REDUCE_SCATTER, GATHER, SCATTER, EXCHANGE, BARRIER})


def needs_peers(op: Any) -> bool:
    """Whether a call of the operator starts or ends communication: it fails if a peer does."""
    return op in COLLECTIVES or op in _NEEDS_PEERS or op is WAIT


_TWINS = "wholestep_functional::aten__"
_INDEXWISE = ("aten::_foreach_", "aten::_fused_", f"{_TWINS}_foreach_", f"{_TWINS}_fused_")


@cache
def is_indexwise(op: Any) -> bool:
    """Whether the operator goes through lists of tensors, each index on its own: ``_foreach_add``, ``_fused_adamw``."""
    if not isinstance(op, torch._ops.OpOverload) or not op._schema.name.startswith(_INDEXWISE):
        return False
    return bool(op._schema.returns) and all("List[Tensor]" in str(one.type) for one in op._schema.returns)


@cache
def may_fail(op: Any) -> bool:
    """Whether a call with right shapes can still fail because of values, peers, or code that is not torch's."""
    if isinstance(op, Segment):
        return any(may_fail(node.target) for node in op.calls)
    if not isinstance(op, torch._ops.OpOverload):
        return False
    if op.namespace in ("aten", "prims", "wholestep"):
        return op in _NEEDS_PEERS or op._schema.name.split("::")[1] in _CHECKS_VALUES
    return not op._schema.name.startswith("wholestep_functional::aten__")


_registered: dict[Any, Any] = {}


def register_in_place(functional: Any, in_place: Any) -> None:
    """Tells that `overridden` writes to its first arguments what `functional` returns, in order."""
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
