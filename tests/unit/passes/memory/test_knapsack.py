"""The knapsack, against every choice there is."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from wholestep.passes.memory import knapsack
from wholestep.passes.memory.knapsack import Item, cheapest

ITEMS = st.lists(st.builds(Item, num_bytes=st.integers(1, 40), us=st.integers(0, 30).map(float)), max_size=10)


def best_us(items: list[Item], need_bytes: int) -> float:
    """The least time of any choice that frees enough."""
    choices = (choice for count in range(len(items) + 1) for choice in combinations(items, count))
    return min(
        sum(one.us for one in choice) for choice in choices if sum(one.num_bytes for one in choice) >= need_bytes
    )


def freed(items: list[Item], chosen: tuple[int, ...]) -> tuple[int, float]:
    assert list(chosen) == sorted(set(chosen))
    return sum(items[index].num_bytes for index in chosen), sum(items[index].us for index in chosen)


def test_the_cheapest_that_are_enough():
    items = [Item(num_bytes=10, us=6), Item(num_bytes=6, us=3), Item(num_bytes=5, us=3), Item(num_bytes=1, us=9)]
    assert cheapest(items, 10) == (0,)
    assert cheapest(items, 11) == (1, 2)
    assert cheapest(items, 0) == ()


def test_all_where_all_are_not_enough():
    assert cheapest([Item(num_bytes=3, us=1), Item(num_bytes=4, us=1)], 8) == (0, 1)
    assert cheapest([], 8) == ()


@given(ITEMS, st.integers(1, 200))
def test_no_choice_is_cheaper(items, need_bytes):
    num_bytes, us = freed(items, cheapest(items, need_bytes))
    if sum(one.num_bytes for one in items) < need_bytes:
        assert num_bytes == sum(one.num_bytes for one in items)
    else:
        assert num_bytes >= need_bytes
        assert us == best_us(items, need_bytes)


@pytest.fixture(scope="module")
def narrow():
    """A limit that small problems reach."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knapsack, "LIMIT", 20)
        yield 20


NEARLY_ALL = [(1, 0), (1, 0), (1, 0), (1, 0), (1, 1), (1, 1), (3, 3), (7, 5), (40, 10), (16, 0)]
"""Where the largest of some alike choices is the only one that becomes enough."""


@given(ITEMS, st.integers(1, 150))
@example([Item(num_bytes=num_bytes, us=us) for num_bytes, us in NEARLY_ALL], 71)
def test_choices_that_count_as_alike_cost_what_a_larger_need_would(narrow, items, need_bytes):
    chosen = cheapest(items, need_bytes)
    num_bytes, us = freed(items, chosen)
    total_bytes = sum(one.num_bytes for one in items)
    assert num_bytes >= min(need_bytes, total_bytes)
    larger_bytes = need_bytes + -(-len(items) * need_bytes // narrow)
    if larger_bytes <= total_bytes:
        assert us <= best_us(items, larger_bytes)
