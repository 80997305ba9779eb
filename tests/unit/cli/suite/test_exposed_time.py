"""Exposed communication is arithmetic on intervals: compared with counting unit by unit."""

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from wholestep.cli.suite.exposed_time import exposed_us, idle_us, total_us, union

MOMENTS = st.integers(0, 30)
INTERVALS = st.lists(st.tuples(MOMENTS, MOMENTS), max_size=8)


def units(intervals: list[tuple[int, int]]) -> set[int]:
    """The moments of width 1 that the intervals cover."""
    return {moment for start, stop in intervals for moment in range(start, stop)}


@given(INTERVALS, INTERVALS)
def test_lengths_are_those_of_counting(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    assert total_us(some) == len(units(some))
    assert exposed_us(some, others) == len(units(some) - units(others))
    covered = units(some)
    assert idle_us(some) == (max(covered) + 1 - min(covered) - len(covered) if covered else 0)


@given(INTERVALS)
@example([(1, 2), (0, 1)])
def test_a_union_is_in_order_and_has_gaps(some: list[tuple[int, int]]) -> None:
    merged = union(some)
    assert units(merged) == units(some)  # type: ignore[arg-type]
    assert all(before[1] < behind[0] for before, behind in pairwise(merged))
    assert all(start < stop for start, stop in merged)
