"""Times that look like a stall of the machine are measured again; what too few points do not say is not made up."""

from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wholestep.cost.calibration.outliers import LONGEST_US, REPEATS, curve_of, in_doubt, quickest, shows_rate, sweep
from wholestep.cost.curve import fitted

SIZES = tuple(2**power for power in range(10, 27, 2))
USUAL_US = {"all_reduce": 150.0, "broadcast": 150.0}
KIB, MIB = 2**10, 2**20


def calm_us(num_bytes: int) -> float:
    """A link of 200 us and 1 GB/s."""
    return 200.0 + num_bytes / 1e3


class Machine:
    """Measures the link; `stall` says how many times as long a measurement takes, from those that came before it."""

    def __init__(self, stall: Callable[[list[tuple[str, int]]], float] = lambda measured: 1.0) -> None:
        self.stall = stall
        self.measured: list[tuple[str, int]] = []

    def __call__(self, op: str, num_bytes: int) -> float:
        us = calm_us(num_bytes) * self.stall(self.measured)
        self.measured.append((op, num_bytes))
        return us


CALM = {op: {size: calm_us(size) for size in SIZES} for op in USUAL_US}


def test_on_a_machine_at_rest_every_message_is_measured_once() -> None:
    machine = Machine()
    assert sweep(machine, SIZES, USUAL_US) == CALM
    assert machine.measured == [(op, size) for op in USUAL_US for size in SIZES]


def test_a_stall_in_the_smallest_message_does_not_end_the_sweep() -> None:
    machine = Machine(lambda measured: 1.0 if measured else 2 * LONGEST_US)
    assert sweep(machine, SIZES, USUAL_US) == CALM
    # The other operation is measured first, which leaves the stall some time; then what was cut off follows.
    first, *others = [(op, size) for op in USUAL_US for size in SIZES]
    assert machine.measured == [first, *others[len(SIZES) - 1 :], first, *others[: len(SIZES) - 1]]


@pytest.mark.parametrize("stalled", [[1], [8], [3, 4]], ids=["a small one", "the largest", "two in a row"])
def test_messages_that_are_out_of_line_are_measured_again(stalled: list[int]) -> None:
    machine = Machine(lambda measured: 30.0 if len(measured) in stalled else 1.0)
    assert sweep(machine, SIZES, USUAL_US) == CALM
    assert sorted(machine.measured[2 * len(SIZES) :]) == [("all_reduce", SIZES[index]) for index in stalled]


def test_a_stall_that_does_not_end_is_measured_so_often_and_the_quickest_is_kept() -> None:
    times = iter([5e5, 3e5, 4e5, 6e5])
    found = sweep(lambda op, num_bytes: next(times), SIZES, {"all_reduce": 150.0})
    assert found == {"all_reduce": {KIB: 3e5}}
    assert next(times, None) is None
    assert REPEATS == 3
    assert in_doubt(found["all_reduce"], 150.0) == [KIB]


def test_a_link_that_is_slow_is_no_stall() -> None:
    """5 ms and 1 MB/s."""
    measured = []

    def slow_us(op: str, num_bytes: int) -> float:
        measured.append(num_bytes)
        return 5e3 + num_bytes

    (found,) = sweep(slow_us, SIZES, {"all_reduce": 150.0}).values()
    assert measured == list(found) == [one for one in SIZES if one <= 2**18]
    assert curve_of(found, lambda size: 150.0 + size / 1.2e3).us(100 * MIB) == pytest.approx(100 * MIB, rel=0.01)


@pytest.mark.parametrize(
    ("points", "sizes"),
    [
        ({}, []),
        ({KIB: 7.5e3}, []),
        ({KIB: 7.6e3}, [KIB]),
        ({KIB: 250.0, 4 * KIB: 100.0}, []),
        ({KIB: 310.0, 4 * KIB: 100.0}, [KIB]),
        ({KIB: 100.0, 4 * KIB: 1500.0}, []),
        ({KIB: 100.0, 4 * KIB: 1700.0}, [4 * KIB]),
        ({KIB: 100.0, 4 * KIB: 1700.0, 16 * KIB: 100.0}, [4 * KIB]),
    ],
    ids=str,
)
def test_what_is_in_doubt(points: Mapping[int, float], sizes: list[int]) -> None:
    assert in_doubt(points, 150.0) == sizes


@given(st.floats(1, 5e3), st.floats(1, 1e7), st.lists(st.floats(0.8, 1.2), min_size=9, max_size=9))
def test_no_latency_and_no_rate_are_in_doubt(latency_us: float, bytes_per_us: float, noise: list[float]) -> None:
    points = {size: one * (latency_us + size / bytes_per_us) for size, one in zip(SIZES, noise, strict=True)}
    assert in_doubt(points, 150.0 + SIZES[0] / bytes_per_us) == []


def default_us(num_bytes: int) -> float:
    return 150.0 + num_bytes / 1.2e3


@pytest.mark.parametrize(
    "points",
    [{KIB: 2e5}, {KIB: 1e5, 4 * KIB: 2e5}, {KIB: 1.9e5, 64 * KIB: 2e5}, {KIB: 2e5, 4 * KIB: 1e5, 64 * KIB: 1.5e5}],
    ids=["one point", "a small span", "a flat line", "all latency"],
)
def test_points_that_say_nothing_of_the_rate_leave_it_to_the_defaults(points: dict[int, float]) -> None:
    assert not shows_rate(points)
    curve = curve_of(points, default_us)
    last = max(points)
    assert curve.us(last) == pytest.approx(points[last], rel=0.2)
    for num_bytes in (3 * MIB, 64 * MIB, 2**33):
        assert curve.us(num_bytes) - curve.us(last) == pytest.approx(num_bytes / 1.2e3, rel=0.15)


def test_points_that_say_it_are_all_there_is() -> None:
    points = {KIB: 100.0, 64 * KIB: 200.0}
    assert shows_rate(points)
    assert curve_of(points, default_us) == fitted(points.items())


def test_of_numbers_measured_at_once_each_has_its_own_quickest() -> None:
    measured = iter([(9.0, 1.0), (1.0, 8.0), (5.0, 5.0)])
    assert list(quickest(lambda: next(measured), (2.0, 2.0))) == [1.0, 1.0]
    assert next(measured) == (5.0, 5.0)  # the second time all were small enough


def test_numbers_that_stay_too_large_are_measured_so_often() -> None:
    calls: list[float] = []

    def measure() -> list[float]:
        calls.append(10.0 - len(calls))
        return [calls[-1]]

    assert quickest(measure, [2.0]) == [7.0]
    assert len(calls) == 1 + REPEATS
