"""A process group whose collectives do nothing: the limit of what hiding communication can reach.

A step compiled over it is planned, scheduled and lowered like the real one, to the last kernel, and its results are
wrong: every rank goes its own way.
"""

from __future__ import annotations

import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401  (it registers the backend)
from torch.distributed.device_mesh import DeviceMesh

from wholestep.run.world import World


def silent_mesh(world: World) -> DeviceMesh | None:
    """All ranks on one axis, over such a group. Every rank has to call it. None for a single process."""
    if world.mesh is None or world.size == 1:
        return world.mesh
    group = dist.new_group(backend="fake")
    return DeviceMesh.from_group(group, world.device.type, mesh_dim_names=world.mesh.mesh_dim_names)
