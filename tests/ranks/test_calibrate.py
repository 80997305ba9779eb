"""Calibration on two ranks: the links are measured, and every rank plans with the same numbers."""

import json

import torch
import torch.distributed as dist

from tests.pools import Pool
from tests.unit.cost.test_calibrate import TINY
from wholestep.cost import calibrate
from wholestep.cost.links import OPS
from wholestep.cost.probe_device import Sizes
from wholestep.run import world
from wholestep.run.meetings import Meetings


def measured(sizes: Sizes) -> tuple[dict[str, object], dict[str, object], bool]:
    """What the rank measured, what it is to use, and whether the group still works."""
    here = world.init()
    assert here.mesh is not None
    group = here.mesh.get_group()
    marks = calibrate.fingerprint(here.device, dist.get_backend(group), here.size)
    own = calibrate.calibrate(here.device, group.group_name, marks, sizes=sizes)
    common = Meetings("calibrated").choose("costs", lambda: calibrate.to_json(own), here)
    total = torch.ones(1, device=here.device)
    dist.all_reduce(total)
    return calibrate.to_json(own), common, float(total) == here.size


def test_two_ranks_measure_their_links_and_use_the_same_numbers(ranks2: Pool) -> None:
    (own, common, alive), (other, same, _) = ranks2.run(measured, TINY)
    assert alive
    assert common == same == json.loads(json.dumps(own))
    assert other != own  # each measured its own device, at its own pace
    links = own["links"]
    assert links["tables"].keys() == set(OPS)
    for op in OPS:
        ((ranks, points),) = links["tables"][op].items()
        assert ranks == "2"
        assert [num_bytes for num_bytes, _ in points] == list(TINY.messages_bytes)
        assert 0 < points[0][1] <= points[1][1]
    assert links == other["links"]  # the slowest rank's, on all
    assert links["launch_us"] >= 0
    assert min(links["compute_slowdown"], links["collective_slowdown"]) >= 1
