"""The strategy of a step whose modules bring their own: DistributedDataParallel or ``fully_shard``."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh

from wholestep.capture.reach.reachable import Reachable
from wholestep.capture.reach.train_state import collect, parallel_parameters
from wholestep.capture.wrappers import ddp, fully_shard_settings
from wholestep.config import DDP, FSDP, CastCompress, CommHook, Compress, PowerSGD, Strategy
from wholestep.errors import CaptureError, ConfigError
from wholestep.ir.dtensor.shards import is_sharded
from wholestep.ir.program import InputKind
from wholestep.runtime.distributed.world import World

log = logging.getLogger("wholestep")


@dataclass(frozen=True, slots=True)
class WrappedStrategy:
    """What the wrappers of a step were told, as options of `compile`."""

    strategy: DDP | FSDP
    mesh: DeviceMesh | None
    """None: the world."""
    reduced: frozenset[int]
    """ids of the parameters whose gradients are reduced."""
    synced: frozenset[int] = frozenset()
    """ids of the buffers that a call begins with as the first rank has them."""

    @property
    def managed(self) -> frozenset[int]:
        """ids of the parameters whose gradients DistributedDataParallel reduces."""
        return self.reduced if isinstance(self.strategy, DDP) else frozenset()


def is_tensor_parallel(found: Reachable, given: Strategy | None) -> bool:
    """Whether a step has modules of ``parallelize_module``, whose DTensors communicate by themselves.

    Raises:
        ConfigError: where a strategy, or a wrapper, would communicate too.
    """
    names = parallel_parameters(found, collect(found))
    if not names:
        return False
    if given is not None:
        raise ConfigError(
            f"{names[0]} is a DTensor of parallelize_module, and the step has strategy="
            f"{type(given).__name__}(...) too. Leave strategy out: such a model communicates itself."
        )
    return True


def wrapped_strategy(found: Reachable, given: Strategy | None, world: World) -> WrappedStrategy | None:
    """The strategy that a step brings in its modules; None where they are plain, or sharded for `given`.

    Raises:
        CaptureError: for wrappers that contradict each other, and for settings that no graph keeps.
        ConfigError: for wrappers that contradict `given`.
    """
    sharded = [one for name, root in found.modules.values() for one in fully_shard_settings.settings_of(name, root)]
    if found.wrappers and sharded:
        names = [name for name, _ in found.wrappers.values()]
        raise CaptureError(f"{names} are DistributedDataParallel, and other modules of the step are sharded. Use one.")
    if not found.wrappers and (not sharded or isinstance(given, FSDP)):
        return None
    if given is not None:
        kind = "DistributedDataParallel" if found.wrappers else "fully_shard"
        raise ConfigError(
            f"The step has modules of {kind}, whose settings it takes over, and strategy={type(given).__name__}(...) "
            f"too. Leave strategy out, or give the step the plain modules."
        )
    return _of_sharded(found, sharded) if sharded else _of_wrappers(found, world)


def _of_wrappers(found: Reachable, world: World) -> WrappedStrategy:
    settings = {name: ddp.settings_of(name, wrapper) for name, wrapper in found.wrappers.values()}
    (first, one), *others = settings.items()
    for name, other in others:
        if other != one:
            raise CaptureError(
                f"{first} and {name} are DistributedDataParallel with other settings: {one} and {other}. The graph of "
                f"a step has one strategy. Wrap them alike, but for buffers and what they ignore, or step them in two."
            )
    wrappers = [wrapper for _, wrapper in found.wrappers.values()]
    synced = frozenset(id(buffer) for wrapper in wrappers for buffer in ddp.synced_buffers(wrapper))
    strategy = DDP(
        bucket_bytes="auto" if one.bucket_bytes is None else one.bucket_bytes,
        sync_at_start=False, broadcast_buffers=bool(synced), compress=_compress(one.hooks),
    )  # fmt: skip
    is_world = dist.get_world_size(one.group) == world.size
    mesh = None if is_world else DeviceMesh.from_group(one.group, world.device.type)
    return WrappedStrategy(strategy, mesh, ddp.managed(wrappers), synced)


def _of_sharded(found: Reachable, settings: list[fully_shard_settings.FullyShardSettings]) -> WrappedStrategy:
    one = settings[0]
    for other in settings[1:]:
        if (other.mesh, other.mp_policy, other.sums) != (one.mesh, one.mp_policy, one.sums):
            raise CaptureError(
                f"Modules of the step were given to fully_shard with other meshes, policies or divide factors: {one} "
                f"and {other}. The graph of a step has one strategy: shard them alike."
            )
    reduced = frozenset(id(slot.tensor) for slot in collect(found).params if is_sharded(slot.tensor))
    strategy = FSDP(
        reduce="sum" if one.sums else "mean", sync_at_start=False, broadcast_buffers=False, mp_policy=one.mp_policy,
        reshard_after_forward=any(other.reshard_after_forward for other in settings),
    )  # fmt: skip
    return WrappedStrategy(strategy, one.mesh, reduced)


def leaving_alone(
    strategy: Strategy, wrapped: WrappedStrategy, state: Iterable[tuple[InputKind, str, torch.Tensor]]
) -> tuple[Strategy, list[str]]:
    """A strategy that leaves to each rank what no wrapper reduces or synchronizes, as eager code does.

    Args:
        state: kinds, names and live tensors of the state of a step.

    Returns:
        The strategy, and the names of the parameters whose gradients stay local. (One that is frozen may be thawed.)
    """
    params, buffers, trained = [], [], []
    for kind, name, one in state:
        if kind is InputKind.PARAM and not is_sharded(one) and id(one) not in wrapped.reduced:
            params.append(name)
            trained += [name] if one.requires_grad else []
        elif kind is InputKind.BUFFER and strategy.broadcast_buffers and id(one) not in wrapped.synced:
            buffers.append(name)
    return replace(strategy, ignore=(*params, *buffers)), trained


def _compress(hooks: tuple[tuple[Any, Any], ...]) -> Compress | None:
    """What travels in the place of gradients, for the last hook that was registered."""
    if not hooks:
        return None
    hook, state = hooks[-1]
    if hook in _PLAIN:
        return None
    if hook in _CASTS:
        return CastCompress(_CASTS[hook])
    if hook is powerSGD_hook:
        return _powersgd(state)
    return CommHook(hook, state)


_PLAIN = (ddp.BUILTIN_HOOKS.ALLREDUCE, default_hooks.allreduce_hook)
_CASTS = {
    ddp.BUILTIN_HOOKS.FP16_COMPRESS: torch.float16,
    default_hooks.fp16_compress_hook: torch.float16,
    default_hooks.bf16_compress_hook: torch.bfloat16,
}
"""Hooks of torch whose numbers are those of `CastCompress`: tests compare them bit by bit."""


def _powersgd(state: PowerSGDState) -> PowerSGD:
    """The same algorithm as part of the graph. (The hook keeps its memory by buckets, in Python.)"""
    if state.iter > 0:
        log.warning("The state of powerSGD_hook has counted %d iterations: a compiled step starts anew.", state.iter)
    return PowerSGD(
        rank=state.matrix_approximation_rank, start_iter=state.start_powerSGD_iter,
        min_compression_rate=state.min_compression_rate, error_feedback=state.use_error_feedback,
        warm_start=state.warm_start, orthogonalization_epsilon=state.orthogonalization_epsilon,
        seed=_seed(state.rng),
    )  # fmt: skip


def _seed(generator: np.random.RandomState) -> int:
    """What a generator was made with, which is the first word of its state."""
    state: Any = generator.get_state()
    return int(state[1][0])
