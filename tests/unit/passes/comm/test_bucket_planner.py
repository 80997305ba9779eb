"""Which gradients share a bucket, on numbers."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import _compute_bucket_assignment_by_size

from wholestep.cost.simulator import Sharing
from wholestep.passes.comm.bucket_planner import (
    DEPENDS,
    END,
    FULL,
    MAX_UNITS,
    Costs,
    Group,
    Outcome,
    fixed_cuts,
    pack,
    planned_cuts,
    predict,
)

FLOAT, DOUBLE = 4, 8


def test_pack_closes_behind_cuts_and_says_why():
    assert pack([4, 4, 4, 9, 1], ["k"] * 5, {1: "one", 2: "two"}) == [
        Group(items=(0, 1), num_bytes=8, reason="one"),
        Group(items=(2,), num_bytes=4, reason="two"),
        Group(items=(3, 4), num_bytes=10, reason=END),
    ]


def test_pack_keeps_a_group_open_for_each_key():
    groups = pack([1, 1, 1, 1], ["x", "y", "x", "y"], {})
    assert [group.items for group in groups] == [(0, 2), (1, 3)]


def test_pack_sees_needs_by_way_of_groups_that_grew_later():
    """Group b needs group a; then a takes an item that needs c; what needs an item of b must not join c."""
    keys, needs = ["a", "b", "b", "c", "a", "c"], [set(), set(), {0}, set(), {3}, {1}]
    groups = pack([1] * 6, keys, {}, needs=[frozenset(one) for one in needs])
    assert [group.items for group in groups] == [(0, 4), (1, 2), (3,), (5,)]
    assert groups[2].reason == DEPENDS


def alternating(count: int) -> tuple[list[int], list[str]]:
    """50 floats, 25 doubles, and so on: 200 bytes each."""
    return [200] * count, ["float" if index % 2 == 0 else "double" for index in range(count)]


@pytest.mark.parametrize(
    ("sizes", "keys", "limits", "expected"),
    [
        ([FLOAT * n for n in (100, 200, 100, 50)], ["float"] * 4, [400], [[0], [1], [2], [3]]),
        (*alternating(6), [400], [[0, 2], [1, 3], [4], [5]]),
        ([FLOAT * 10] * 4, ["float"] * 4, [40, 80], [[0], [1, 2], [3]]),
        (*alternating(6), [200, 400], [[0], [1], [2, 4], [3, 5]]),
    ],
)
def test_with_a_bound_the_assignment_is_that_of_ddp(sizes, keys, limits, expected):
    groups = pack(sizes, keys, fixed_cuts(sizes, keys, limits))
    assert [list(group.items) for group in groups] == expected
    assert all(group.reason == (FULL if group.num_bytes >= limits[0] else END) for group in groups[:1])


@given(st.lists(st.integers(1, 100), max_size=30), st.data())
def test_the_rule_of_ddp_is_torchs_own(sizes, data):
    import torch

    kinds = st.sampled_from([torch.float32, torch.float64])
    keys = data.draw(st.lists(kinds, min_size=len(sizes), max_size=len(sizes)))
    limits = data.draw(st.lists(st.integers(1, 600), min_size=1, max_size=3))
    tensors = [torch.empty(size, dtype=key) for size, key in zip(sizes, keys, strict=True)]
    sizes_bytes = [tensor.nbytes for tensor in tensors]
    theirs = _compute_bucket_assignment_by_size(tensors, limits)[0] if tensors else []
    ours = pack(sizes_bytes, keys, fixed_cuts(sizes_bytes, keys, limits))
    assert sorted(list(group.items) for group in ours) == sorted(theirs)


@st.composite
def packing(draw):
    count = draw(st.integers(0, 25))
    sizes = draw(st.lists(st.integers(0, 20), min_size=count, max_size=count))
    keys = draw(st.lists(st.sampled_from("abc"), min_size=count, max_size=count))
    needs: list[frozenset[int]] = []
    for item in range(count):
        direct = draw(st.frozensets(st.integers(0, item - 1), max_size=2)) if item else frozenset()
        needs.append(direct.union(*(needs[other] for other in direct)))
    return sizes, keys, draw(st.integers(1, 40)), needs


@given(packing())
def test_pack_keeps_its_promises(case):
    sizes, keys, limit, needs = case
    groups = pack(sizes, keys, fixed_cuts(sizes, keys, [limit]), needs=needs)
    assert sorted(item for group in groups for item in group.items) == list(range(len(sizes)))
    for group in groups:
        assert list(group.items) == sorted(group.items)
        assert len({keys[item] for item in group.items}) == 1
        assert group.num_bytes == sum(sizes[item] for item in group.items)
    assert_no_cycle(groups, needs)


def assert_no_cycle(groups: list[Group], needs: list[frozenset[int]]) -> None:
    """The groups can be done one after another: at any time one is left whose needs are done."""
    done: set[int] = set()
    left = list(groups)
    while left:
        ready = next((group for group in left if all(needs[item] <= done for item in group.items)), None)
        assert ready is not None
        done.update(ready.items)
        left.remove(ready)


@st.composite
def costs(draw, max_items: int = 8, shares: tuple[float, ...] = (1.0,), calls: tuple[float, ...] = (0.0,)):
    count = draw(st.integers(1, max_items))
    sizes = draw(st.lists(st.integers(1, 50), min_size=count, max_size=count))
    gaps = draw(st.lists(st.integers(0, 60), min_size=count, max_size=count))
    ready = [float(one) for one in itertools.accumulate(gaps)]
    latency, rate = draw(st.integers(0, 40)), draw(st.sampled_from([0.1, 0.5, 1.0, 3.0]))
    share = draw(st.sampled_from(shares))
    known = Costs(
        ready_us=ready,
        update_us=[float(draw(st.integers(0, 20))) for _ in sizes],
        end_us=ready[-1] + draw(st.integers(0, 30)),
        comm_us=lambda num_bytes: latency + rate * num_bytes,
        launch_us=draw(st.sampled_from(calls)),
        calls_us=draw(st.sampled_from(calls)),
        fill_us=draw(st.sampled_from(calls)),
        sharing=Sharing(compute=share, collective=share),
        barrier=draw(st.booleans()),
    )
    return sizes, known


@given(costs(max_items=40, shares=(1.0, 1.2, 1.5), calls=(0.0, 5.0)), st.integers(1, 400), st.integers(20, 200))
def test_planned_buckets_expose_no_more_than_others_and_keep_the_cap(case, cap_bytes, limit_bytes):
    sizes, known = case
    keys = ["k"] * len(sizes)
    others = [fixed_cuts(sizes, keys, [limit_bytes]), {}]
    groups = pack(sizes, keys, planned_cuts(sizes, keys, known, cap_bytes=cap_bytes, baselines=others))
    assert all(group.num_bytes <= cap_bytes or len(group.items) == 1 for group in groups)
    found = predict(groups, known)
    rivals = [pack(sizes, keys, cuts) for cuts in others]
    bound_us = min(predict(rival, known).exposed_us for rival in rivals)
    free = known.sharing.compute == 1 and not known.launch_us + known.calls_us + known.fill_us
    for rival in rivals:
        if any(group.num_bytes > cap_bytes and len(group.items) > 1 for group in rival):
            continue
        other = predict(rival, known)
        assert found.exposed_us <= other.exposed_us + 1e-2
        # Where nothing slows anything down exposing less is being faster; else it may cost time.
        if free or other.exposed_us <= bound_us:
            assert found.total_us <= other.total_us + 1e-2


@given(costs(max_items=30, shares=(1.0, 1.5), calls=(0.0, 5.0)))
def test_no_single_cut_could_be_better(case):
    sizes, known = case
    keys = ["k"] * len(sizes)
    cuts = set(planned_cuts(sizes, keys, known, cap_bytes=10**9))
    found_us = predict(pack(sizes, keys, dict.fromkeys(cuts, "")), known).total_us
    changes = [cuts ^ {item} for item in range(len(sizes) - 1)]
    changes += [cuts ^ {item, item + 1} for item in range(len(sizes) - 2) if (item in cuts) != (item + 1 in cuts)]
    for change in changes:
        assert predict(pack(sizes, keys, dict.fromkeys(change, "")), known).total_us >= found_us - 1e-2


@given(costs())
def test_planned_buckets_are_about_the_best_there_are(case):
    """Against every way to cut, where nothing slows anything down: there the search is exact."""
    sizes, known = case
    keys = ["k"] * len(sizes)
    ways = itertools.chain.from_iterable(itertools.combinations(range(len(sizes) - 1), n) for n in range(len(sizes)))
    best_us = min(predict(pack(sizes, keys, dict.fromkeys(way, "")), known).total_us for way in ways)
    found = pack(sizes, keys, planned_cuts(sizes, keys, known, cap_bytes=10**9))
    assert predict(found, known).total_us <= best_us + 1e-2


def test_a_shorter_step_that_exposes_more_than_fixed_buckets_is_not_taken():
    sizes, keys = [20, 20, 10], ["k"] * 3
    known = Costs(
        ready_us=[20.0, 40.0, 50.0], update_us=[0.0, 20.0, 5.0], end_us=60.0,
        comm_us=lambda num_bytes: 20.0 + num_bytes, sharing=Sharing(compute=1.5, collective=1.5),
    )  # fmt: skip
    fixed = fixed_cuts(sizes, keys, [20])
    assert predict(pack(sizes, keys, {}), known) == Outcome(150, 60)
    assert predict(pack(sizes, keys, fixed), known) == Outcome(165, 50)
    assert planned_cuts(sizes, keys, known, cap_bytes=1000) == {}
    cuts = planned_cuts(sizes, keys, known, cap_bytes=1000, baselines=[fixed, {}])
    assert cuts == {1: "cut: one bucket with the next gradients would expose 10.0 us more than fixed buckets"}
    assert predict(pack(sizes, keys, cuts), known) == Outcome(155, 50)


def test_what_a_bucket_costs_the_device_counts():
    """Two small gradients: their updates as two calls would take longer than the second bucket hides."""
    sizes, keys = [100, 100], ["k", "k"]
    plain = Costs(ready_us=[0.0, 50.0], update_us=[1.0, 1.0], end_us=50.0, comm_us=lambda num_bytes: 5 + num_bytes / 20)
    assert list(planned_cuts(sizes, keys, plain, cap_bytes=1000)) == [0]
    assert planned_cuts(sizes, keys, replace(plain, calls_us=6.0), cap_bytes=1000) == {}
    assert planned_cuts(sizes, keys, replace(plain, launch_us=6.0), cap_bytes=1000) == {}
    # Where the host is the device, it does nothing else while it starts a reduction.
    pair = pack(sizes, keys, {0: ""})
    started = predict(pair, replace(plain, launch_us=6.0))
    assert started.exposed_us == predict(pair, replace(plain, calls_us=6.0)).exposed_us + 12
    # Without one it is the other way round: two gradients of one bucket are put together first.
    assert list(planned_cuts(sizes, keys, replace(plain, calls_us=6.0, fill_us=6.0), cap_bytes=1000)) == [0]


def test_the_last_gradients_travel_in_a_small_bucket():
    """What is ready last cannot be hidden, so there is little of it."""
    sizes, keys = [1_000_000] * 20, ["k"] * 20
    known = Costs(
        ready_us=[100.0 * (index + 1) for index in range(20)], update_us=[1.0] * 20, end_us=2000.0,
        comm_us=lambda num_bytes: 30 + num_bytes / 20_000,
    )  # fmt: skip
    groups = pack(sizes, keys, planned_cuts(sizes, keys, known, cap_bytes=10**9))
    assert len(groups) > 1
    assert groups[-1].num_bytes == min(group.num_bytes for group in groups)
    assert "us more" in groups[0].reason


def test_many_gradients_are_looked_at_in_runs():
    count = 20 * MAX_UNITS
    known = Costs(
        ready_us=[float(index) for index in range(count)], update_us=[0.1] * count, end_us=float(count),
        comm_us=lambda num_bytes: 50 + num_bytes / 1000,
    )  # fmt: skip
    sizes, keys = [700] * count, ["k"] * count
    groups = pack(sizes, keys, planned_cuts(sizes, keys, known, cap_bytes=10**9, baselines=[{}]))
    assert predict(groups, known).total_us < predict(pack(sizes, keys, {}), known).total_us


def test_what_travels_in_fewer_bytes_arrives_earlier():
    """A share of a half: the second bucket is there before it would be ready to leave at full size."""
    sizes, keys = [1000, 1000], ["k", "k"]
    known = Costs(ready_us=[10.0, 20.0], update_us=[1.0, 1.0], end_us=20.0, comm_us=lambda num_bytes: num_bytes / 10)
    pair = pack(sizes, keys, {0: ""})
    assert predict(pair, known).total_us == 10 + 100 + 100 + 1
    assert predict(pair, replace(known, shares=[0.5, 0.5])).total_us == 10 + 50 + 50 + 1
    assert predict(pair, replace(known, shares=[1.0, 0.5])).total_us == 10 + 100 + 50 + 1


def test_the_search_knows_what_travels():
    """A reduction that is hidden at a quarter of its bytes wants no bucket of its own for the last gradient."""
    sizes, keys = [1_000_000] * 8, ["k"] * 8
    known = Costs(
        ready_us=[100.0 * (index + 1) for index in range(8)], update_us=[30.0] * 8, end_us=800.0,
        comm_us=lambda num_bytes: 30 + num_bytes / 10_000,
    )  # fmt: skip
    light = replace(known, shares=[0.25] * 8)
    plans = [planned_cuts(sizes, keys, one, cap_bytes=10**9, baselines=[{}]) for one in (known, light)]
    assert len(plans[1]) < len(plans[0])
    assert predict(pack(sizes, keys, plans[1]), light).total_us <= predict(pack(sizes, keys, plans[0]), light).total_us
