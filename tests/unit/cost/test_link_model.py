"""Times of collectives: through what was measured, monotone in bytes, carried over to other numbers of ranks."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wholestep.cost.cost_model import CostModel
from wholestep.cost.curve import fitted
from wholestep.cost.link_model import COPIES_GAIN, COPIES_US, OPS, ROUND_US, Links, uniform, with_copies
from wholestep.errors import ConfigError

LINK = uniform(latency_us=20.0, bus_bytes_per_us=1e4, launch_us=5.0)


def synthetic_us(op: str, num_bytes: int, ranks: int) -> float:
    """A ring with a protocol that switches: short messages at a quarter of the bandwidth."""
    share = {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0}.get(op, (ranks - 1) / ranks)
    rounds = ranks - 1 if op == "all_to_all" else math.log2(ranks)
    return 12.0 * rounds + share * (num_bytes / 2e4 + 3 * min(num_bytes, 2**18) / 2e4)


def calibrated(ranks: int) -> Links:
    sizes = [2**power for power in range(10, 27, 2)]
    tables = {op: {ranks: fitted((size, synthetic_us(op, size, ranks)) for size in sizes)} for op in OPS}
    return Links(tables=tables, launch_us=1.0)


@given(st.sampled_from(OPS), st.integers(0, 2**33), st.integers(0, 2**33), st.integers(2, 512))
def test_more_bytes_never_take_less_time(op: str, a: int, b: int, ranks: int) -> None:
    less, more = sorted((a, b))
    assert 0 < LINK.us(op, less, ranks) <= LINK.us(op, more, ranks) * (1 + 1e-12)


@given(st.sampled_from(OPS), st.integers(2**10, 2**28))
def test_sizes_between_the_measured_ones_are_predicted(op: str, num_bytes: int) -> None:
    predicted, wanted = calibrated(2).us(op, num_bytes, 2), synthetic_us(op, num_bytes, 2)
    assert wanted / 1.15 <= predicted <= wanted * 1.15


@given(st.sampled_from(OPS), st.integers(2**10, 2**28), st.integers(2, 64))
def test_other_numbers_of_ranks_are_predicted(op: str, num_bytes: int, ranks: int) -> None:
    """The smallest message that is measured holds some transfer, which is then taken for latency: hence 1.3."""
    predicted, wanted = calibrated(4).us(op, num_bytes, ranks), synthetic_us(op, num_bytes, ranks)
    assert wanted / 1.3 <= predicted <= wanted * 1.3


def test_a_hand_computed_ring() -> None:
    """64 MB over 1e4 B/us on 8 ranks: 2 x 7/8 of the message in an all-reduce, three rounds of latency for one."""
    num_bytes = 64_000_000
    assert LINK.us("all_reduce", num_bytes, 8) == pytest.approx(3 * 20 + 2 * 7 / 8 * 6400, rel=0.01)
    assert LINK.us("all_gather", num_bytes, 8) == pytest.approx(3 * 20 + 7 / 8 * 6400, rel=0.01)
    assert LINK.us("broadcast", num_bytes, 8) == pytest.approx(3 * 20 + 6400, rel=0.01)
    assert LINK.us("all_to_all", num_bytes, 8) == pytest.approx(7 * 20 + 7 / 8 * 6400, rel=0.01)


def test_the_closest_measurement_counts() -> None:
    two, sixteen = fitted([(1, 10.0), (2, 20.0)]), fitted([(1, 100.0), (2, 200.0)])
    links = Links(tables={"all_reduce": {2: two, 16: sixteen}}, launch_us=0.0)
    assert links.us("all_reduce", 1, 2) == 10.0
    assert links.us("all_reduce", 1, 16) == 100.0
    assert links.us("all_reduce", 1, 4) == 20.0
    assert links.us("all_reduce", 1, 8) == pytest.approx(75.0)


def test_an_operation_that_was_not_measured_is_derived_from_the_all_reduce() -> None:
    links = Links(tables={"all_reduce": {2: fitted([(1000, 10.0), (1_000_000, 110.0)])}}, launch_us=0.0)
    assert links.us("all_gather", 1_000_000, 2) == pytest.approx(10 + 100 / 2)


def test_one_rank_talks_to_nobody() -> None:
    assert LINK.us("all_reduce", 1_000_000, 1) == 0.0


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="'gossip'"):
        LINK.us("gossip", 1, 2)
    with pytest.raises(ConfigError, match="all_reduce"):
        Links(tables={}, launch_us=1.0)
    with pytest.raises(ConfigError, match="2 ranks"):
        Links(tables={"all_reduce": {1: fitted([(1, 1), (2, 2)])}}, launch_us=1.0)
    with pytest.raises(ConfigError, match="slowdowns"):
        Links(tables=LINK.tables, launch_us=1.0, compute_slowdown=0.5)


def test_copies_carry_more_and_begin_later() -> None:
    """On H200s, as they were measured: a message of W1 among four takes 0.6 to 0.8 ms, and NCCL 0.9."""
    links = CostModel.default("h200+nvlink").links
    found = with_copies(links, ranks=4, least_bytes=4 << 20)
    large = 147 << 20
    wanted = COPIES_US + 6 * ROUND_US + (links.us("all_reduce", large, 4) - links.us("all_reduce", 1, 4)) / COPIES_GAIN
    assert found.us("all_reduce", large, 4) == pytest.approx(wanted, rel=0.05)
    assert 700 < found.us("all_reduce", large, 4) < links.us("all_reduce", large, 4)
    assert found.us("all_reduce", 4 << 20, 4) > links.us("all_reduce", 4 << 20, 4)
    assert found.us("all_reduce", 1 << 20, 4) == pytest.approx(links.us("all_reduce", 1 << 20, 4), rel=0.05)
    assert found.us("all_gather", large, 4) == links.us("all_gather", large, 4)
    assert found.us("all_reduce", large, 2) == links.us("all_reduce", large, 2)
    assert 1 <= found.collective_slowdown < links.collective_slowdown
    assert 1 <= found.compute_slowdown < links.compute_slowdown


@given(st.floats(1.0, 1e4), st.floats(1e2, 1e6), st.integers(2, 16))
def test_whatever_the_links_more_bytes_take_no_less_time_by_copies(latency_us: float, rate: float, ranks: int) -> None:
    links = uniform(latency_us=latency_us, bus_bytes_per_us=rate, launch_us=5.0)
    found = with_copies(links, ranks=ranks, least_bytes=4 << 20)
    times_us = [found.us("all_reduce", 1 << power, ranks) for power in range(34)]
    assert times_us == sorted(times_us)
