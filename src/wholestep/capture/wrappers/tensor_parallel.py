"""Modules of ``parallelize_module``: a trace sees this rank's parts of their parameters.

DTensor stays what it is in eager code: it turns a call on DTensors into calls on parts, and collectives between them.
Those are what a trace records, as AOTAutograd does for tensor subclasses. So the communication of such a module is part
of the graph, and no strategy adds any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._random import OffsetBasedRNGTracker
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils import _pytree as pytree

from wholestep.capture.reach.reachable import Reachable
from wholestep.capture.reach.train_state import Slot, TrainState
from wholestep.capture.wrappers.fully_shard_settings import parameters_of, sharded_modules
from wholestep.errors import CaptureError


def of_parallel_modules(found: Reachable, state: TrainState) -> list[Slot]:
    """Parameters that are DTensors, and that ``fully_shard`` has not cut alone."""
    known = {id(one) for _, root in found.modules.values() for one in parameters_of(root)}
    return [slot for slot in state.params if isinstance(slot.tensor, DTensor) and id(slot.tensor) not in known]


def check_parts(found: Reachable, state: TrainState, leaves: Iterable[object]) -> None:
    """Raises CaptureError for what no graph of parts holds, before one is traced."""
    if found.wrappers or sharded_modules(root for _, root in found.modules.values()):
        raise CaptureError("The step has modules of parallelize_module, and others that are wrapped or fully sharded.")
    for slot in (one for one in state.slots if isinstance(one.tensor, DTensor)):
        mesh, shape = slot.tensor.device_mesh, slot.tensor.shape
        for axis, placed in enumerate(slot.tensor.placements):
            if isinstance(placed, Shard) and shape[placed.dim] % mesh.size(axis):
                raise CaptureError(
                    f"{slot.name} is a DTensor of {list(shape)}, whose parts along dim {placed.dim} are not of one "
                    f"size on {mesh.size(axis)} ranks. All ranks run one graph: make the size a multiple of that."
                )
    for slot in (one for one in state.params if isinstance(one.tensor.grad, DTensor)):
        raise CaptureError(f"{slot.name} is a DTensor and has a gradient already. {_CLEAR}")
    if any(isinstance(leaf, DTensor) for leaf in leaves):
        raise CaptureError("An argument is a DTensor. Pass a plain tensor, as modules of parallelize_module take it.")


def check_results(state: TrainState, leaves: Iterable[object]) -> None:
    """Raises CaptureError for DTensors that a trace has made and that live on behind it."""
    for slot in (one for one in state.params if isinstance(one.tensor.grad, DTensor)):
        raise CaptureError(f"The step leaves the gradient of {slot.name}, which is a DTensor. {_CLEAR}")
    if any(isinstance(leaf, DTensor) for leaf in leaves):
        raise CaptureError("The step returns a DTensor, or puts one into an optimizer. Return its full_tensor().")


_CLEAR = "Call zero_grad() behind the update, and not in front of the backward."


@contextmanager
def numbers_stand_apart() -> Iterator[None]:
    """While open, how results are placed does not depend on numbers of optimizers, which are symbols in a trace.

    Raises CaptureError inside for random numbers of DTensors on a GPU: their generator is moved by rank.
    """
    original = ShardingPropagator.propagate_op_sharding_non_cached

    def propagate(propagator: ShardingPropagator, schema: OpSchema) -> Any:
        plain = OpSchema(
            schema.op, pytree.tree_map(_plain, schema.args_schema), pytree.tree_map(_plain, schema.kwargs_schema),
            schema_info=schema.schema_info,
        )  # fmt: skip
        found = original(propagator, plain)
        again = found.redistribute_schema
        if again is not None:
            again.args_schema = pytree.tree_map(_symbol, again.args_schema)
            again.kwargs_schema = pytree.tree_map(_symbol, again.kwargs_schema)
        return found

    with (
        patch.object(ShardingPropagator, "propagate_op_sharding_non_cached", propagate),
        patch.object(OffsetBasedRNGTracker, "_distribute_region", _refuse_draws),
    ):
        yield


class _Number(float):
    """Stands for a number that is a symbol where nothing is computed with it."""

    symbol: torch.SymFloat


def _plain(value: Any) -> Any:
    if not isinstance(value, torch.SymFloat):
        return value
    number = _Number(1.5)
    number.symbol = value
    return number


def _symbol(value: Any) -> Any:
    return value.symbol if isinstance(value, _Number) else value


def _refuse_draws(*_: Any, **__: Any) -> NoReturn:
    raise CaptureError("A DTensor draws random numbers, whose generator stands elsewhere on each rank.")
