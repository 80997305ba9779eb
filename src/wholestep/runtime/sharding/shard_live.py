"""Shards the live objects of a step, in place, before it is captured.

Parameters become those of torch's own ``fully_shard``, so evaluation, ``state_dict`` and checkpoints between calls are
torch's code. A plain parameter object cannot become a DTensor: a new object takes its place in modules and wherever
else it is held (`wholestep.runtime.sharding.replace_references`). Modules and optimizers stay the objects that they
are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from wholestep.capture.reach.reachability import find_reachable
from wholestep.capture.reach.reachable import Reachable
from wholestep.capture.reach.train_state import CutState, states
from wholestep.capture.wrappers.fully_shard_hooks import is_fully_sharded, note_strategy
from wholestep.capture.wrappers.fully_shard_settings import gather_once, sharded_modules
from wholestep.config import FSDP, ZeRO
from wholestep.ir.dtensor.shards import cut, default_dim, is_sharded, replicated_and
from wholestep.ir.program import MeshAxis
from wholestep.runtime.buffer_sync import broadcast_over
from wholestep.runtime.distributed.world import init
from wholestep.runtime.sharding.materialize import Initialize, check_initializers, is_on_meta, materialize
from wholestep.runtime.sharding.replace_references import cut_state, replace_everywhere
from wholestep.runtime.sharding.units import units_of
from wholestep.runtime.sharding.whole_copies import allow_copies
from wholestep.runtime.sharding.whole_parameters import reduce_whole

log = logging.getLogger("wholestep")


class LiveSharding:
    """Shards what a step can reach before a trace of it, each thing once."""

    def __init__(self, step: Callable[..., Any], initialize: Initialize | None = None) -> None:
        """`initialize`: of modules on the meta device, as `materialize` takes it."""
        self._step, self._initialize = step, initialize
        self.cut_state: CutState | None = None
        """What a strategy that shards the state of optimizers alone does with new state."""

    def __call__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], config: FSDP | ZeRO, mesh: DeviceMesh,
        axes: tuple[MeshAxis, ...],
    ) -> list[FSDPModule]:  # fmt: skip
        """Under FSDP see `shard_parameters`; under ZeRO cuts the state of optimizers. Returns modules that are cut."""
        found = find_reachable(self._step, args, kwargs)
        if isinstance(config, FSDP):
            shard_parameters(found, config, mesh, axes, initialize=self._initialize)
            return sharded_modules(root for _, root in found.modules.values())
        ignored = {
            id(param)
            for name, root in found.modules.values()
            for fqn, param in root.named_parameters()
            if {fqn, f"{name}.{fqn}"} & set(config.ignore)
        }
        self.cut_state = partial(_cut_like_parameter, mesh, axes[0].size, ignored)
        for _, opt in found.optimizers.values():
            for param, held in states(opt):
                self.cut_state(param, held)
        return []


def shard_parameters(
    found: Reachable, config: FSDP, mesh: DeviceMesh, axes: tuple[MeshAxis, ...], initialize: Initialize | None = None
) -> None:
    """Shards every module that the step can reach and that is not sharded yet, and moves optimizers over.

    Args:
        mesh: of one axis, or of two, over the last of which parameters are cut.
        axes: those of the mesh, as graphs see them: state is made equal over all of them.

    Raises:
        PlacementError: for units that share parameters with others, and for modules on the meta device that cannot
            initialise themselves.
    """
    if initialize is None:
        for name, root in found.modules.values():
            check_initializers(root, name)
    for name, root in found.modules.values():
        units = units_of(root, config.units)
        if all(map(is_sharded, _cut_parameters(root, config, name))) or all(map(is_fully_sharded, units)):
            reduce_whole(root, _ignored_parameters(root, config, name), config, axes)
            continue
        if config.sync_at_start:
            tensors = [*root.parameters(), *root.buffers()]
            broadcast_over([one for one in tensors if not is_sharded(one) and not one.is_meta], axes)
        seed = common_seed(axes) if is_on_meta(root) else 0
        for unit in units:
            made = materialize(root, unit, init().device, seed, initialize) if is_on_meta(unit) else []
            pairs = _shard_unit(root, unit, config, mesh, name)
            last = {id(old): new for old, new in pairs}
            replace_everywhere([*pairs, *((old, last.get(id(new), new)) for old, new in made)])
        gather_once([root])
        reduce_whole(root, _ignored_parameters(root, config, name), config, axes)
        log.info("%s is sharded over %d ranks", name, axes[0].size)


def materialize_whole(
    model: nn.Module, axes: tuple[MeshAxis, ...], device: torch.device, initialize: Initialize | None = None
) -> None:
    """Makes and initialises all of a model that is on the meta device, whole on every rank."""
    if not is_on_meta(model):
        return
    if initialize is None:
        check_initializers(model, "model")
    replace_everywhere(materialize(model, model, device, common_seed(axes), initialize))


def common_seed(axes: tuple[MeshAxis, ...]) -> int:
    """The seed of torch's generator on the first rank."""
    seed = torch.tensor([torch.initial_seed() % 2**62], device=init().device)
    broadcast_over([seed], axes)
    return int(seed.item())


def _cut_like_parameter(
    mesh: DeviceMesh, num_ranks: int, ignored: set[int], param: torch.Tensor, held: dict[Any, Any]
) -> None:
    if param.dim() > 0 and id(param) not in ignored:
        cut_state(param, held, mesh, _state_placements(param, mesh, num_ranks))


def _state_placements(param: torch.Tensor, mesh: DeviceMesh, num_ranks: int) -> tuple[Placement, ...]:
    return replicated_and(default_dim(tuple(param.shape), num_ranks), mesh)


def layout_of_state(
    config: ZeRO, mesh: DeviceMesh, name: str, param: torch.Tensor
) -> tuple[DeviceMesh, tuple[Placement, ...]] | None:
    """How `ZeRO` cuts state of the shape of a parameter, as a first call would; None: it stays whole.

    `name` is the parameter's in its model; `ZeRO(ignore=...)` may have that of the model before it.
    """
    is_ignored = any(one == name or one.endswith(f".{name}") for one in config.ignore)
    if param.dim() == 0 or is_ignored:
        return None
    return mesh, _state_placements(param, mesh, mesh.size(mesh.ndim - 1))


def _cut_parameters(root: nn.Module, config: FSDP, name: str) -> list[torch.Tensor]:
    """Those that the strategy cuts: not the ignored ones, and not what `fully_shard` refuses: single numbers, and those
    that lie in another order than their dims."""
    named = [(fqn, one) for fqn, one in root.named_parameters() if one.dim() > 0 and one.is_contiguous()]
    return [one for fqn, one in named if not {fqn, f"{name}.{fqn}"} & set(config.ignore)]


def _ignored_parameters(root: nn.Module, config: FSDP, name: str) -> list[torch.Tensor]:
    return [one for fqn, one in root.named_parameters() if {fqn, f"{name}.{fqn}"} & set(config.ignore)]


def _shard_unit(
    root: nn.Module, unit: nn.Module, config: FSDP, mesh: DeviceMesh, name: str
) -> list[tuple[torch.Tensor, DTensor]]:
    before = {fqn: one for fqn, one in root.named_parameters(remove_duplicate=False) if not is_sharded(one)}
    kept = {id(one) for one in _cut_parameters(root, config, name)}
    ignored = {one for one in before.values() if id(one) not in kept}
    # A root that stayed gathered after a forward without a backward would be stale after the next compiled call.
    num_ranks = mesh.size(mesh.ndim - 1)
    module: Any = fully_shard(
        unit, mesh=mesh, reshard_after_forward=True,
        shard_placement_fn=config.shard_placement_fn or (lambda one: Shard(default_dim(tuple(one.shape), num_ranks))),
        mp_policy=config.mp_policy or MixedPrecisionPolicy(), ignored_params=ignored or None,
    )  # fmt: skip
    allow_copies(unit)
    note_strategy(module)
    if config.reduce == "sum":
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # not every backend multiplies before a sum
    pairs: dict[int, tuple[torch.Tensor, DTensor]] = {}
    for fqn, new in root.named_parameters(remove_duplicate=False):
        old = before.get(fqn)
        if old is not None and is_sharded(new):
            pairs[id(old)] = (old, new)
    for leaving, sharded in pairs.values():
        vars(sharded).update(vars(leaving))
        _take_hooks(leaving, sharded)
        if leaving.grad is not None:
            sharded.grad = cut(leaving.grad, sharded.device_mesh, sharded.placements)
    return list(pairs.values())


def _take_hooks(leaving: torch.Tensor, sharded: DTensor) -> None:
    """Compiled steps call the hooks of a parameter with whole gradients, as they do without a strategy."""
    sharded._backward_hooks = leaving._backward_hooks
    if leaving._post_accumulate_grad_hooks:
        sharded._post_accumulate_grad_hooks = leaving._post_accumulate_grad_hooks
