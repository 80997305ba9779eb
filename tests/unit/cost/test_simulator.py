"""The clock: collectives beside computation, queues on links, what is exposed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wholestep.cost.simulator import ALONE, Sharing, Task, simulate


def chain(*tasks: Task) -> list[Task]:
    return list(tasks)


def test_a_hidden_collective_costs_nothing():
    found = simulate(chain(Task(comm_us=50), Task(us=60), Task(waits_for=(0,))))
    assert found.total_us == 60
    assert found.exposed_us == {0: 0.0}
    assert (found.comm_start_us[0], found.comm_end_us[0]) == (0, 50)


def test_what_is_not_hidden_is_exposed():
    found = simulate(chain(Task(us=10), Task(comm_us=50), Task(us=20), Task(waits_for=(1,)), Task(us=5)))
    assert found.total_us == 65
    assert found.exposed_us == {1: 30.0}
    assert found.start_us[4] == 60


def test_collectives_on_one_link_go_one_after_another():
    tasks = chain(Task(comm_us=50, link="a"), Task(comm_us=50, link="a"), Task(waits_for=(1,)))
    assert simulate(tasks).total_us == 100
    other = chain(Task(comm_us=50, link="a"), Task(comm_us=50, link="b"), Task(waits_for=(1,)))
    assert simulate(other).total_us == 50


def test_both_are_slower_beside_each_other():
    """50 us of communication take 100 us beside computation, which gets 50 of its 80 us done in them."""
    tasks = chain(Task(comm_us=50), Task(us=80), Task(waits_for=(0,)))
    found = simulate(tasks, sharing=Sharing(compute=2.0, collective=2.0))
    assert found.comm_end_us[0] == 100
    assert found.total_us == 130


def test_what_nobody_waits_for_still_has_to_end():
    assert simulate(chain(Task(comm_us=50), Task(us=10))).total_us == 50


def test_an_order_can_be_given():
    tasks = chain(Task(us=60), Task(comm_us=50), Task(waits_for=(1,)))
    assert simulate(tasks).total_us == 110
    assert simulate(tasks, [1, 0, 2]).total_us == 60


@st.composite
def programs(draw) -> list[Task]:
    tasks: list[Task] = []
    starts: list[int] = []
    for number in range(draw(st.integers(1, 20))):
        kind = draw(st.sampled_from(["compute", "start", "wait"]))
        if kind == "start":
            tasks.append(Task(comm_us=float(draw(st.integers(0, 50))), link=draw(st.sampled_from("ab"))))
            starts.append(number)
        elif kind == "wait" and starts:
            tasks.append(Task(waits_for=(draw(st.sampled_from(starts)),)))
        else:
            tasks.append(Task(us=float(draw(st.integers(0, 50)))))
    return tasks


@given(programs(), st.sampled_from([ALONE, Sharing(compute=1.5, collective=1.2)]))
def test_bounds(tasks, sharing):
    """A step takes at least its computation and each link's messages, and at most all of them, slowed down."""
    found = simulate(tasks, sharing=sharing)
    compute_us = sum(task.us for task in tasks)
    by_link = {link: sum(task.comm_us or 0 for task in tasks if task.link == link) for link in "ab"}
    assert found.total_us >= max(compute_us, *by_link.values()) - 1e-6
    assert found.total_us <= sharing.compute * compute_us + sharing.collective * sum(by_link.values()) + 1e-6
    assert found.total_exposed_us <= found.total_us
    for start, end in zip(found.start_us, found.end_us, strict=True):
        assert start <= end
    assert found.comm_start_us.keys() == found.comm_end_us.keys() == found.exposed_us.keys()


@pytest.mark.parametrize("sharing", [ALONE, Sharing(compute=3.0, collective=1.5)])
def test_the_same_numbers_every_time(sharing):
    tasks = [Task(us=1.1), Task(comm_us=7.3), Task(us=2.7), Task(comm_us=0.9, link="b"), Task(waits_for=(1, 3))]
    assert simulate(tasks, sharing=sharing) == simulate(tasks, sharing=sharing)
