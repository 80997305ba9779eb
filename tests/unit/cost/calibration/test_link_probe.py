"""The probe of links on simulated ones: what a stall does to a time, to a curve, and to what is said."""

import logging
from collections.abc import Callable

import pytest
import torch

from wholestep.cost import default_ceilings
from wholestep.cost.calibration import link_probe
from wholestep.cost.link_model import OPS, Links

CPU = torch.device("cpu")
USUAL = default_ceilings.LINKS["gloo"]
SIZES = tuple(2**power for power in range(10, 27, 2))

Us = Callable[[str, int], float]


def probed(patch: pytest.MonkeyPatch, us: Us, *, launch_us: float = 400.0, rank: int = 0) -> tuple[Links, str]:
    """What is made of collectives that take `us`, on one of two ranks."""

    class Clock:
        def __init__(self, group: str, device: torch.device) -> None:
            pass

        def us(self, call: tuple[str, int]) -> float:
            return us(*call)

    patch.setattr(link_probe, "_Clock", Clock)
    patch.setattr(link_probe, "group_named", lambda name: None)
    patch.setattr(link_probe.dist, "get_world_size", lambda group: 2)
    patch.setattr(link_probe.dist, "get_rank", lambda group: rank)
    patch.setattr(link_probe, "_call", lambda op, num_bytes, group, device: (op, num_bytes))
    patch.setattr(link_probe, "_launch_us", lambda clock, call: launch_us)
    patch.setattr(link_probe, "_slowdowns", lambda clock, num_bytes: (1.5, 1.5))
    return link_probe.probe_links("group", CPU, SIZES, usual=USUAL)


def calm_us(op: str, num_bytes: int) -> float:
    return 300.0 + num_bytes / 1e3


def stalled_us(op: str, num_bytes: int) -> float:
    return 2.1e5 if op == "all_reduce" else calm_us(op, num_bytes)


def test_links_at_rest_are_what_was_measured(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    links, doubt = probed(monkeypatch, calm_us)
    assert [links.tables[op][2].points for op in OPS] == [tuple((size, calm_us("", size)) for size in SIZES)] * len(OPS)
    assert (links.launch_us, links.compute_slowdown, links.collective_slowdown) == (400.0, 1.5, 1.5)
    assert doubt == ""
    assert not caplog.records


def test_one_message_that_was_measured_in_a_stall_does_not_make_minutes_of_a_larger_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    links, doubt = probed(monkeypatch, stalled_us)
    assert links.us("all_reduce", 1024, 2) == 2.1e5
    usual_us = USUAL.us("all_reduce", 3 * 2**20, 2)
    assert links.us("all_reduce", 3 * 2**20, 2) == pytest.approx(2.1e5 + usual_us, rel=0.01)
    assert links.us("broadcast", 2**20, 2) == pytest.approx(calm_us("", 2**20))
    assert doubt == "all_reduce of 1.0 KiB took 210,000 us and 1 more like it; calibrate again when nothing else runs"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert doubt in record.getMessage()


def test_one_rank_speaks_for_all(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    _, doubt = probed(monkeypatch, stalled_us, rank=1)
    assert doubt
    assert not caplog.records


def test_the_price_of_a_collective_is_in_doubt_too(monkeypatch: pytest.MonkeyPatch) -> None:
    links, doubt = probed(monkeypatch, calm_us, launch_us=1e5)
    assert links.launch_us == 1e5
    assert doubt == "the start of a collective took 100,000 us; calibrate again when nothing else runs"


def test_a_call_that_was_disturbed_once_is_timed_as_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was the one that says how many calls there is time for, and one of these few."""
    now_s, took_s = [0.0], iter([0.001, 0.3, 0.001, 0.3, 0.002, 0.5, 0.5])
    monkeypatch.setattr(link_probe.time, "perf_counter", lambda: now_s[0])
    clock = link_probe._Clock("group", CPU)
    monkeypatch.setattr(clock, "slowest", lambda us: us)

    def call() -> torch.Tensor:
        now_s[0] += next(took_s)
        return torch.ones(())

    assert clock.us(call) == pytest.approx(2e3)
    assert list(took_s) == [0.5, 0.5]
