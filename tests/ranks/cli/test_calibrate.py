"""Calibration on two ranks: the links are measured, and every rank plans with the same numbers."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.harness.rank_pools import Pool
from tests.unit.cost.calibration.test_calibrate import TINY
from wholestep.cost import default_ceilings
from wholestep.cost.calibration import calibrate, link_probe
from wholestep.cost.calibration.device_probe import Sizes
from wholestep.cost.cost_model import CostModel
from wholestep.cost.link_model import OPS
from wholestep.runtime.distributed import world
from wholestep.runtime.distributed.rendezvous import Rendezvous


def measured(sizes: Sizes) -> tuple[dict[str, object], dict[str, object], bool]:
    """What the rank measured, what it is to use, and whether the group still works."""
    here = world.init()
    assert here.mesh is not None
    group = here.mesh.get_group()
    marks = calibrate.fingerprint(here.device, dist.get_backend(group), here.size)
    own = calibrate.calibrate(here.device, group.group_name, marks, sizes=sizes)
    common = Rendezvous("calibrated").choose("costs", lambda: calibrate.to_json(own), here)
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
        # So few bytes say little of the rate, so the defaults may go on after them.
        assert [num_bytes for num_bytes, _ in points[:2]] == list(TINY.messages_bytes)
        assert 0 < points[0][1] <= points[1][1]
    assert links == other["links"]  # the slowest rank's, on all
    assert links["launch_us"] >= 0
    assert min(links["compute_slowdown"], links["collective_slowdown"]) >= 1


def stalled_on_the_last_rank() -> tuple[dict[str, object], str, int]:
    """The links, what is in doubt, and how often this rank has sent one small message."""
    here = world.init()
    assert here.mesh is not None
    group = here.mesh.get_group()
    each_us, calls = link_probe._Clock._each_us, []

    def stalled_us(clock: link_probe._Clock, call: link_probe.Call, count: int) -> float:
        calls.append(count)
        us = each_us(clock, call, count)
        # A measurement is three calls of this; two measurements of the first message fall into the stall.
        return us + 3e5 if here.rank == here.size - 1 and len(calls) <= 6 else us

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link_probe._Clock, "_each_us", stalled_us)
        patch.setattr(link_probe, "OPS", ("all_reduce",))
        usual = default_ceilings.LINKS["gloo"]
        links, doubt = link_probe.probe_links(group.group_name, here.device, TINY.messages_bytes, usual=usual)
    return calibrate.to_json(replace(CostModel.default("cpu+gloo"), links=links))["links"], doubt, len(calls)


def test_all_ranks_measure_again_what_one_of_them_was_stalled_in(ranks2: Pool) -> None:
    (links, doubt, calls), other = ranks2.run(stalled_on_the_last_rank)
    assert (links, doubt, calls) == other
    assert links["tables"]["all_reduce"]["2"][0][1] < 3e5
