"""Modules of ``parallelize_module``: a trace sees this rank's parts of their parameters.

DTensor stays what it is in eager code: it turns a call on DTensors into calls on parts, and collectives between them.
Those are what a trace records, as AOTAutograd does for tensor subclasses. So the communication of such a module is part
of the graph, and no strategy adds any. What a step leaves as a DTensor (a gradient, state of an optimizer, a result)
leaves the graph as this rank's part, with a `DTensorLayout` that makes a DTensor of it again after each call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._random import OffsetBasedRNGTracker
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from wholestep.capture.python.user_frame import current_line
from wholestep.capture.wrappers.fully_shard_settings import parameters_of, parameters_of_all
from wholestep.errors import CaptureError
from wholestep.ir.dtensor.layouts import DTensorLayout, local_tensor


def parallel_parameters(roots: Iterable[nn.Module], params: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Names of the parameters that are DTensors, and that ``fully_shard`` has not cut alone. `roots`: of modules."""
    known = {id(one) for root in roots for one in parameters_of(root)}
    found = [(name, param) for name, param in params if isinstance(param, DTensor) and id(param) not in known]
    known = {id(one) for one in parameters_of_all()} if found else known
    return [name for name, param in found if id(param) not in known]


def check_parts(state: Iterable[tuple[str, torch.Tensor]], arguments: Iterable[object]) -> None:
    """Raises CaptureError for what no graph of parts holds, before one is traced. `arguments`: those of this call."""
    for name, tensor in state:
        if isinstance(tensor, DTensor) and (why := DTensorLayout.of(tensor).why_uneven()):
            raise CaptureError(f"{name} is a DTensor of {list(tensor.shape)} that {why}. {_EVEN}")
    for one in arguments:
        if isinstance(one, DTensor):
            raise CaptureError(
                f"An argument of the step is a DTensor of {list(one.shape)}. Pass a plain tensor, as modules of "
                f"parallelize_module take it, or make the DTensor in the step (DTensor.from_local)."
            )


def placements_of_copy(tensor: DTensor) -> tuple[Placement, ...]:
    """How a clone of a DTensor is placed: some versions of torch add up what is a sum still, and others do not."""
    with _disable_current_modes(), torch.no_grad():  # the trace must not see it
        local = torch.empty(local_tensor(tensor).shape, dtype=tensor.dtype, device="meta")
        copy: Any = DTensorLayout.of(tensor).around(local).clone()
        return tuple(copy.placements)


def layouts(results: Iterable[object], shown: Iterable[torch.Tensor]) -> list[DTensorLayout | None]:
    """Of each thing that a trace leaves what makes a DTensor of its part again; None for what is no DTensor.

    `shown`: the state, of which a part may be no view: later calls write there. Raises CaptureError for one that is,
    and for a DTensor whose parts may have several shapes.
    """
    memory = {tensor.untyped_storage()._cdata for tensor in shown}
    found: list[DTensorLayout | None] = []
    for one in results:
        if not isinstance(one, DTensor):
            found.append(None)
            continue
        layout = DTensorLayout.of(one)
        if why := layout.why_uneven():
            raise CaptureError(f"The step leaves a DTensor of {list(one.shape)} that {why}. {_EVEN}")
        if local_tensor(one).untyped_storage()._cdata in memory:
            raise CaptureError(
                f"The step returns a DTensor of {list(one.shape)} in the memory of its state, which later calls write "
                f"to. Return a copy (clone()), or the parameter itself."
            )
        found.append(layout)
    return found


_EVEN = "All ranks run one graph: make such sizes multiples of the number of ranks."


@contextmanager
def numbers_stand_apart() -> Iterator[None]:
    """While open, how results are placed does not depend on numbers of optimizers, which are symbols in a trace.

    Raises CaptureError inside for random numbers of DTensors on a GPU, for which each rank moves its generator.
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

    draws = [name for name in ("_distribute_region", "_compute_rng_offsets") if hasattr(OffsetBasedRNGTracker, name)]
    with ExitStack() as stack:
        stack.enter_context(patch.object(ShardingPropagator, "propagate_op_sharding_non_cached", propagate))
        stack.enter_context(_symbols_forgotten())
        for name in draws:
            stack.enter_context(patch.object(OffsetBasedRNGTracker, name, _refuse_draws))
        yield


@contextmanager
def _symbols_forgotten() -> Iterator[None]:
    """While open, nothing is remembered of how the results of calls with symbols are placed.

    C++ keeps that by the arguments of calls, and compares them, symbols of other traces among them. Its cache is empty
    before such a call and after it. It may not be emptied within one, of which it holds a place.
    """
    dispatcher: Any = DTensor._op_dispatcher
    handlers, forget = dispatcher._custom_op_handlers, torch._C._clear_DTensor_sharding_propagator_cache
    running: list[Any] = []

    def call(op: Any, args: Any, kwargs: Any) -> Any:
        handlers.pop(op, None)  # the call comes by here again
        is_first = not running and any(isinstance(one, torch.SymFloat) for one in pytree.tree_leaves((args, kwargs)))
        running.append(op)
        try:
            if is_first:
                forget()
            return op(*args, **kwargs)
        finally:
            running.pop()
            handlers[op] = call
            if is_first:
                forget()

    rules = dispatcher.sharding_propagator
    known = {*rules.op_strategy_funcs, *rules.op_single_dim_strategy_funcs, *rules.op_to_rules} - handlers.keys()
    with patch.dict(handlers, {op: call for op in known if _takes_numbers(op)}):
        yield


def _takes_numbers(op: Any) -> bool:
    types = [str(one.type) for one in op._schema.arguments]
    return any(name in one for one in types for name in ("number", "float"))


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
    raise CaptureError(
        f"A DTensor draws random numbers at {current_line()}, and each rank moves its generator to another place for "
        f"it. Draw on plain tensors: dropout on to_local(), or outside of the parallel modules."
    )
