"""``fully_shard``: what its owner set, read from the state that torch keeps for each module."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import Replicate

from wholestep.capture.wrappers.fully_shard_hooks import groups_of, is_of_strategy, reduced_last
from wholestep.errors import CaptureError, ConfigError


@dataclass(frozen=True, slots=True)
class FullyShardSettings:
    """What a module was sharded with."""

    mesh: DeviceMesh
    mp_policy: MixedPrecisionPolicy
    reshard_after_forward: bool
    sums: bool
    """Whether gradients are summed and not averaged."""


def sharded_modules(roots: Iterable[nn.Module]) -> list[FSDPModule]:
    """The modules inside of `roots` that were given to ``fully_shard``."""
    return [module for root in roots for module in root.modules() if isinstance(module, FSDPModule)]


def parameters_of(root: nn.Module) -> list[torch.Tensor]:
    """The sharded parameters of every module inside of `root` that was sharded over data alone."""
    return _over_data(one for _, group in _groups(root) for one in group.fsdp_params)


def parameters_of_all() -> list[torch.Tensor]:
    """Those of every module of this process: a step may have parameters of an optimizer, and not of their module.

    Looks at all objects of Python, which takes tens of milliseconds.
    """
    return _over_data(one for one in gc.get_objects() if type(one) is FSDPParam)


def _over_data(params: Iterable[FSDPParam]) -> list[torch.Tensor]:
    sharded: list[Any] = [one.sharded_param for one in params]
    return [one for one in sharded if sum(not isinstance(placed, Replicate) for placed in one.placements) <= 1]


_ACCUMULATES = "_wholestep_accumulates"
"""Where it is noted with a group that an eager backward has left gradients, which it may not have reduced."""
_SETTINGS = (
    "mp_policy", "gradient_divide_factor", "_all_reduce_hook", "_all_gather_comm", "_reduce_scatter_comm", _ACCUMULATES,
)  # fmt: skip
"""Attributes of a group of parameters that a trace depends on, but for `_RESHARD`."""
_RESHARD = "post_forward_mesh_info"
"""Torch sets that of the outermost module itself, in its first eager forward."""


def gathered_leaves(roots: Iterable[nn.Module]) -> dict[int, torch.Tensor]:
    """By id of sharded parameters the whole ones that forwards have used, which are the leaves of their graphs."""
    params = [one for root in roots for _, group in _groups(root) for one in group.fsdp_params]
    return {id(one.sharded_param): one._unsharded_param for one in params if hasattr(one, "_unsharded_param")}


def kept_gathered(modules: Iterable[FSDPModule]) -> dict[int, torch.Tensor | None]:
    """By id of parameters of `modules` that torch keeps gathered after a forward the gathered one.

    None where it is not gathered now, since another forward than torch's has run.
    """
    groups = [one for one in chain.from_iterable(map(groups_of, modules)) if one.post_forward_mesh_info is None]
    pairs = ((group, one) for group in groups for one in group.fsdp_params)
    return {id(one.sharded_param): one._unsharded_param if group.is_unsharded else None for group, one in pairs}


def sharded_by_user(roots: Iterable[nn.Module]) -> frozenset[int]:
    """ids of the sharded parameters of modules that no strategy has sharded."""
    return frozenset(id(one.sharded_param) for group in groups_of_user(roots) for one in group.fsdp_params)


def groups_of_user(roots: Iterable[nn.Module]) -> list[Any]:
    """The groups of parameters of those modules."""
    modules = (module for module in sharded_modules(roots) if not is_of_strategy(module))
    return [group for module in modules for group in groups_of(module)]


def waits_for_more(root: nn.Module) -> bool:
    """Whether gradients stay local for now: ``set_requires_gradient_sync(False)``."""
    return any(not group.reduce_grads for _, group in _groups(root))


def settle(modules: Iterable[FSDPModule]) -> None:
    """Puts in order what eager code has left, which a graph would not see: parameters that are gathered, which a step
    makes stale, are dropped, and gradients that wait for the last micro-batch are reduced. All ranks take part.
    """
    for module in modules:
        module.reshard()
        for group in groups_of(module):
            if vars(group).get(_ACCUMULATES):
                setattr(group, _ACCUMULATES, False)
                _reduce_accumulated(group)


def again_through(modules: Iterable[FSDPModule], backward: Callable[[], Any]) -> Any:
    """A backward after one that has made a graph, and may go through that graph. All ranks take part.

    Such a graph reads gathered parameters, and has no hook of torch that would gather them or reduce their gradients.
    What is gathered is dropped at the end: after an update it would be old, and a forward would compute with it.
    """
    used = [*modules]
    for module in used:
        if any(hasattr(one, "_unsharded_param") for group in groups_of(module) for one in group.fsdp_params):
            module.unshard()
    try:
        with reduced_last():
            result = backward()
        for group in chain.from_iterable(map(groups_of, used)):
            if group.reduce_grads:
                _reduce_accumulated(group)
    finally:
        for module in used:
            module.reshard()
    return result


def _reduce_accumulated(group: Any) -> None:
    if not _has_accumulated(group):
        return
    waits, phase, group.reduce_grads = not group.reduce_grads, group._training_state, True
    try:
        group.post_backward()
        group.finalize_backward()
    finally:
        group.reduce_grads, group._training_state = not waits, phase


def _has_accumulated(group: Any) -> bool:
    made = [one for one in group.fsdp_params if hasattr(one, "_unsharded_param")]
    return any(one._unsharded_param.grad is not None or one.unsharded_accumulated_grad is not None for one in made)


def _note_accumulations(group: Any) -> None:
    if _ACCUMULATES in vars(group):
        return
    setattr(group, _ACCUMULATES, _has_accumulated(group))  # a backward may have come before anybody noted it
    note = partial(_note_accumulation, weakref.ref(group))
    for whole in [one._unsharded_param for one in group.fsdp_params if hasattr(one, "_unsharded_param")]:
        if whole.requires_grad:
            whole.register_post_accumulate_grad_hook(note)
        elif whole.is_floating_point() and not whole.is_inference():  # frozen now, and maybe not for ever
            whole.requires_grad_(True).register_post_accumulate_grad_hook(note)
            whole.requires_grad_(False)


def _note_accumulation(group: weakref.ref[Any], _: torch.Tensor) -> None:
    if (one := group()) is not None:
        setattr(one, _ACCUMULATES, True)


def gather_once(roots: Iterable[nn.Module]) -> list[FSDPModule]:
    """Has torch make the whole parameters of every module of ``fully_shard`` inside of `roots`, if it has not yet.

    Returns those modules. From then on eager backwards note that they have left gradients, for `settle`.

    It makes them in a module's first gather and keeps them. A graph gathers without them, so the first gather may be an
    evaluation in inference mode, and what is made there serves no training any more. All ranks take part.

    Modules whose parameters that train have several dtypes are left as they are: torch itself gathers no such module
    (AssertionError), so none of them has an eager forward.
    """
    modules = sharded_modules(roots)
    for module in modules:
        groups = groups_of(module)
        is_made = all(hasattr(one, "_unsharded_param") for group in groups for one in group.fsdp_params)
        if not is_made and all(map(_has_one_dtype, groups)):
            module.unshard()
            module.reshard()
        for group in groups:
            _note_accumulations(group)
    return modules


def _has_one_dtype(group: Any) -> bool:
    trained = {one.sharded_param.dtype for one in group.fsdp_params if one.sharded_param.requires_grad}
    return len(trained) <= 1


def watched(name: str, module: nn.Module, *, is_root: bool) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    """The settings of one module that its owner may change between calls: dicts, and the keys to look at.

    Raises ConfigError for a module of the older wrapper, whose parameters nobody can look at.
    """
    if isinstance(module, FullyShardedDataParallel):
        raise ConfigError(
            f"{name} is wrapped in FullyShardedDataParallel, which holds parameters in flat tensors of its own. Use "
            f"torch.distributed.fsdp.fully_shard, or pass the plain module with "
            f"wholestep.compile(strategy=wholestep.FSDP())."
        )
    if isinstance(module, FSDPModule):
        for group in groups_of(module):
            yield vars(group), _SETTINGS if is_root else (*_SETTINGS, _RESHARD)


def settings_of(name: str, root: nn.Module) -> list[FullyShardSettings]:
    """Those of every module inside of `root` that was sharded. Raises CaptureError for what no graph keeps."""
    return [_settings(f"{name}.{fqn}" if fqn else name, group) for fqn, group in _groups(root)]


def _groups(root: nn.Module) -> Iterator[tuple[str, Any]]:
    for fqn, module in root.named_modules():
        if isinstance(module, FSDPModule):
            yield from ((fqn, group) for group in groups_of(module))


def _settings(name: str, group: Any) -> FullyShardSettings:
    if isinstance(group.offload_policy, CPUOffloadPolicy):
        raise CaptureError(
            f"{name} was sharded with fully_shard(offload_policy=CPUOffloadPolicy()). A compiled step keeps parameters "
            f"on the device: shard without offload_policy."
        )
    own = {
        "set_all_reduce_hook": group._all_reduce_hook is not None,
        "set_custom_all_gather": type(group._all_gather_comm) is not DefaultAllGather,
        "set_custom_reduce_scatter": type(group._reduce_scatter_comm) is not DefaultReduceScatter,
        "fsdp_pre_all_gather": any(
            hasattr(one._sharded_local_tensor, "fsdp_pre_all_gather") for one in group.fsdp_params
        ),
    }
    for what, is_there in own.items():
        if is_there:
            raise CaptureError(
                f"{name} has {what}, which a graph does not call. Shard it without, or run it in eager code."
            )
    factor = group.gradient_divide_factor
    if factor not in (None, 1, group.mesh_info.mesh.size()):
        raise CaptureError(
            f"{name} divides gradients by {factor}. A compiled step averages them over all ranks, or sums them "
            f"(set_gradient_divide_factor(1)); scale the loss for anything else."
        )
    return FullyShardSettings(
        mesh=group.mesh_info.mesh, mp_policy=group.mp_policy,
        reshard_after_forward=group.post_forward_mesh_info is not None,
        sums=factor == 1 and group.mesh_info.mesh.size() > 1,
    )  # fmt: skip
