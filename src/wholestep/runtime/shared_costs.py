"""The costs that a compiled step is planned with: what rank 0 knows about its host, the same on every rank."""

from __future__ import annotations

import torch.distributed as dist

from wholestep.cost.calibration import calibrate
from wholestep.cost.cost_model import CostModel
from wholestep.runtime.distributed.rendezvous import Rendezvous
from wholestep.runtime.distributed.world import World

COSTS = "costs"
"""The question to which the costs are the answer."""


def agreed_costs(rendezvous: Rendezvous, world: World) -> CostModel:
    """Costs from the calibration of rank 0's host, else the defaults of its device; always the same ones."""
    chosen = rendezvous.choose(
        COSTS, lambda: calibrate.to_json(calibrate.find(world.device, host_fingerprint(world))), world
    )
    return calibrate.from_json(chosen)


def host_fingerprint(world: World) -> calibrate.Fingerprint:
    """The facts that a calibration for this world depends on."""
    backend = "none" if world.mesh is None else dist.get_backend(world.mesh.get_group())
    return calibrate.fingerprint(world.device, backend, world.size)
