"""Curves: through their points, never falling, straight beyond them."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wholestep.cost.curve import Curve, fitted, straight
from wholestep.errors import ConfigError

amounts = st.floats(1.0, 1e10)
measurements = st.lists(st.tuples(amounts, st.floats(1e-3, 1e7)), min_size=2, max_size=12, unique_by=lambda p: p[0])


@given(measurements, amounts, amounts)
def test_more_work_never_takes_less_time(measured: list[tuple[float, float]], a: float, b: float) -> None:
    curve = fitted(measured)
    less, more = sorted((a, b))
    assert curve.us(less) <= curve.us(more) * (1 + 1e-12)
    assert curve.us(less) >= curve.floor_us


@given(measurements)
def test_measurements_that_rise_are_kept_and_others_averaged(measured: list[tuple[float, float]]) -> None:
    curve = fitted(measured)
    ordered = sorted(measured)
    assert [amount for amount, _ in curve.points] == [amount for amount, _ in ordered]
    times = [us for _, us in ordered]
    if all(a < b for a, b in pairwise(times)):
        assert [us for _, us in curve.points] == times
    assert sum(us for _, us in curve.points) == pytest.approx(sum(times))


def test_neighbours_that_contradict_share_their_mean() -> None:
    assert fitted([(1, 10), (2, 30), (3, 20), (4, 40)]).points == ((1, 10), (2, 25), (3, 25), (4, 40))


def test_between_points_logarithms_are_interpolated_and_beyond_them_it_is_straight() -> None:
    curve = Curve(points=((10.0, 1.0), (1000.0, 4.0)))
    assert curve.us(0) == curve.us(10) == curve.floor_us == 1.0
    assert curve.us(100) == pytest.approx(2.0)
    assert curve.us(1000) == 4.0
    assert curve.us(1000 + 990) == pytest.approx(7.0)


def test_noise_between_the_last_points_is_no_slope_and_neither_is_what_small_amounts_take() -> None:
    curve = Curve(points=((1e3, 1e5), (1e5, 2e5), (4e5, 2.2e5), (1e6, 2.2e5)))
    assert curve.us(2e6) == pytest.approx(2.2e5 + 1e6 * 2e4 / 9e5)


def test_a_straight_curve_is_floor_and_rate() -> None:
    curve = straight(floor_us=5.0, per_us=100.0)
    for amount in (3e3, 7e5, 1e9):
        assert curve.us(amount) == pytest.approx(5.0 + amount / 100.0, rel=0.03)


def test_what_is_counted_elsewhere_is_taken_off_and_nothing_gets_negative() -> None:
    assert fitted([(1, 2), (2, 5)]).less(3.0).points == ((1, 1e-3), (2, 2))


@pytest.mark.parametrize(
    "points",
    [
        (),
        ((1.0, 1.0),),
        ((1.0, 0.0), (2.0, 1.0)),
        ((1.0, 1.0), (2.0, math.inf)),
        ((2.0, 1.0), (1.0, 2.0)),
        ((1.0, 2.0), (2.0, 1.0)),
    ],
    ids=str,
)
def test_points_that_make_no_curve_are_refused(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ConfigError, match="curve wants"):
        Curve(points=points)
