"""What a sharded strategy does in a step that is live, whose Python runs at every call.

Under FSDP pieces gather and reduce as the graph of a whole step does. What is no piece runs as eager code, with the
hooks of ``fully_shard``. ZeRO needs a graph for its updates on shards, so optimizer state becomes whole again, and the
step runs as under DDP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

from wholestep.capture.reach.reachability import find_reachable
from wholestep.capture.reach.reachable import Reachable
from wholestep.capture.reach.train_state import states
from wholestep.config import DDP, FSDP, DataParallelOptions, Strategy, ZeRO
from wholestep.ir.dtensor.shards import is_sharded
from wholestep.ir.program import MeshAxis


def live_strategy(
    step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], strategy: Strategy
) -> Strategy:
    """The strategy under which a step runs live. Every rank has to come: ZeRO gathers state."""
    if not isinstance(strategy, ZeRO):
        return strategy
    _make_whole(find_reachable(step, args, kwargs))
    return DDP(**{field.name: getattr(strategy, field.name) for field in fields(DataParallelOptions)})


def live_note(strategy: Strategy, axes: tuple[MeshAxis, ...]) -> str:
    """What a user should know of a strategy in a live step on a mesh with these axes."""
    if isinstance(strategy, FSDP):
        return "What is no piece runs as eager code, for which the hooks of fully_shard gather parameters."
    is_eager = " On a mesh of two axes the step runs as eager code." if len(axes) > 1 else ""
    whole = "ZeRO keeps optimizer state whole on every rank, as DDP does."
    return f"{whole}{is_eager}" if isinstance(strategy, ZeRO) else ""


def _make_whole(found: Reachable) -> None:
    """Gathers the state of optimizers, and gradients, of parameters that are whole."""
    with torch.no_grad():
        for _, opt in found.optimizers.values():
            for param, held in states(opt):
                if is_sharded(param):
                    continue
                for key, value in held.items():
                    if isinstance(value, torch.Tensor) and is_sharded(value):
                        held[key] = value.full_tensor()
                if param.grad is not None and is_sharded(param.grad):
                    param.grad = param.grad.full_tensor()
