"""shard(): what the first call of a step does with its model and optimizers, said explicitly."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from wholestep.config import FSDP, Strategy, ZeRO
from wholestep.errors import ConfigError
from wholestep.runtime.distributed import nccl_connect
from wholestep.runtime.distributed.world import init
from wholestep.runtime.options import data_axes
from wholestep.runtime.sharding.materialize import Initialize
from wholestep.runtime.sharding.shard_live import LiveSharding, materialize_whole


def shard(
    model: nn.Module,
    *optimizers: Optimizer,
    strategy: Strategy | None = None,
    mesh: DeviceMesh | None = None,
    initialize: Initialize | None = None,
) -> None:
    """Shards a model and its optimizers in place; what is on the meta device is made and initialised before.

    The first call of a compiled step does the same. Call this where a model is too large for one rank
    (``with torch.device("meta"): model = Model()``), or to load a checkpoint into its shards.

    Args:
        model: parameters become those of ``fully_shard`` under `FSDP`; under other strategies they stay whole.
        optimizers: their parameters are exchanged, and their state is cut.
        strategy: that of the step; None: `FSDP()`.
        mesh: that of the step.
        initialize: sets the parameters and buffers of one module, those of its children not; called for each module
            that has any on the meta device. By default its ``reset_parameters``. Numbers do not depend on the number
            of ranks: every module is initialised whole, under a seed of its name.

    Raises:
        ConfigError: for something that is no module or no optimizer.
        PlacementError: for a module on the meta device that cannot initialise itself, named before anything is done.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"wholestep.shard wants a module, got {type(model).__name__}.")
    wrong = next((one for one in optimizers if not isinstance(one, Optimizer)), None)
    if wrong is not None:
        raise ConfigError(f"wholestep.shard wants optimizers after the model, got {type(wrong).__name__}.")
    strategy = FSDP() if strategy is None else strategy
    world = init()
    mesh = world.mesh if mesh is None else mesh
    nccl_connect.wait()
    axes = data_axes(world, mesh)
    is_alone = mesh is None or mesh.size() == 1
    if is_alone or not isinstance(strategy, FSDP):
        materialize_whole(model, () if is_alone else axes, world.device, initialize)
    if mesh is not None and not is_alone and isinstance(strategy, (FSDP, ZeRO)):
        LiveSharding(_step, initialize)((model, *optimizers), {}, strategy, mesh, axes)


def _step(*things: Any) -> None:
    """Has the arguments of a step, and does nothing."""
