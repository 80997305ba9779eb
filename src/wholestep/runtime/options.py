"""The options of `compile` as a record, checked before anything is done with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch.distributed.device_mesh import DeviceMesh

from wholestep.config import FSDP, Inductor, Pad, Strategy, ZeRO
from wholestep.errors import ConfigError
from wholestep.ir.program import MeshAxis
from wholestep.passes.default_passes import DefaultPasses, as_passes
from wholestep.passes.pass_manager import Pass
from wholestep.runtime.distributed.world import World

Backend = Literal["auto", "eager", "inductor"] | Inductor
Passes = DefaultPasses | Pass | Sequence[Pass] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The checked options of `compile`."""

    strategy: Strategy | None
    mesh: DeviceMesh | None
    backend: Backend
    passes: DefaultPasses
    max_retraces: int
    fullgraph: bool = False
    """Whether a step that is more than one graph is an error."""
    dynamic: bool | None = None
    """Whether sizes of arguments are symbols: from the first trace on, never, or once they have moved (None)."""
    pad: Mapping[str, Pad] = field(default_factory=dict)
    """By the name of an argument how it is padded."""


def checked_options(
    strategy: Any,
    mesh: Any,
    backend: Any,
    passes: Any,
    max_retraces: int,
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    pad: Mapping[str, Pad] | None = None,
) -> Options:
    """The options as a record. Raises ConfigError for those that cannot be used."""
    if strategy is not None and not isinstance(strategy, Strategy):
        raise ConfigError(f"wholestep.compile(strategy=...) wants a strategy such as ws.DDP(), got {strategy!r}.")
    if backend not in ("auto", "eager", "inductor") and not isinstance(backend, Inductor):
        raise ConfigError(
            f'wholestep.compile(backend=...) wants "auto", "eager", "inductor" or ws.Inductor(...), got {backend!r}.'
        )
    _check_mesh(mesh, strategy)
    if not isinstance(passes, DefaultPasses):
        extra = () if passes is None else as_passes(passes, "wholestep.compile(passes=...)")
        passes = DefaultPasses(extra=extra)
    if max_retraces < 0:
        raise ConfigError(f"wholestep.compile(max_retraces=...) wants 0 or more, got {max_retraces}.")
    if not isinstance(fullgraph, bool):
        raise ConfigError(f"wholestep.compile(fullgraph=...) wants True or False, got {fullgraph!r}.")
    if dynamic not in (None, True, False):
        raise ConfigError(f"wholestep.compile(dynamic=...) wants True, False or None, got {dynamic!r}.")
    if not isinstance(pad or {}, Mapping) or not all(isinstance(one, Pad) for one in (pad or {}).values()):
        raise ConfigError(f'wholestep.compile(pad=...) wants {{"tokens": ws.Pad(dim=1, multiple=64)}}, got {pad!r}.')
    return Options(
        strategy=strategy, mesh=mesh, backend=backend, passes=passes, max_retraces=max_retraces, fullgraph=fullgraph,
        dynamic=dynamic, pad=dict(pad or {}),
    )  # fmt: skip


REPLICATE_AXIS, SHARD_AXIS = "dp_replicate", "dp_shard"
"""Names of the axes of a mesh of two, as `fully_shard` takes them: parts are equal over the first one."""


def data_axes(world: World, mesh: DeviceMesh | None) -> tuple[MeshAxis, ...]:
    """The mesh axes that data is spread over, as graphs see them: first the one over which state may be cut."""
    mesh = world.mesh if mesh is None else mesh
    if mesh is None:
        return ()
    if mesh.ndim == 1:
        name = mesh.mesh_dim_names[0] if mesh.mesh_dim_names else "data"
        return (MeshAxis(name=name, size=mesh.size(), group=mesh.get_group().group_name),)
    names = mesh.mesh_dim_names or (REPLICATE_AXIS, SHARD_AXIS)
    return tuple(MeshAxis(name=names[dim], size=mesh.size(dim), group=mesh.get_group(dim).group_name) for dim in (1, 0))


def _check_mesh(mesh: Any, strategy: Strategy | None) -> None:
    if mesh is None:
        return
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"wholestep.compile(mesh=...) wants a torch.distributed.DeviceMesh, got {mesh!r}.")
    if mesh.ndim == 1:
        return
    if not isinstance(strategy, (FSDP, ZeRO)):
        raise ConfigError(f"wholestep.compile(mesh=...) wants one axis for DDP, got the axes {mesh.mesh_dim_names}.")
    if mesh.mesh_dim_names != (REPLICATE_AXIS, SHARD_AXIS):
        raise ConfigError(
            f'wholestep.compile(mesh=...) wants one axis, or the axes ("{REPLICATE_AXIS}", "{SHARD_AXIS}"), got '
            f"{mesh.mesh_dim_names or f'{mesh.ndim} axes without names'}."
        )
