"""Gathers start early, as far as memory allows: on numbers."""

from __future__ import annotations

from dataclasses import replace

from wholestep.cost.liveness import Make, Usage
from wholestep.cost.simulator import Task
from wholestep.passes.schedule.list_scheduler import list_schedule
from wholestep.passes.schedule.ordering_problem import Problem, given_order
from wholestep.passes.schedule.prefetch import prefetch

LAYER_US, GATHER_US, UNIT_BYTES = 50.0, 40.0, 100


def layers(count: int, *, crowded: int | None = None) -> tuple[Problem, list[str]]:
    """Layers with a cast, a gather and a wait before each; `crowded`: a layer that needs ten units besides."""
    names: list[str] = []
    tasks: list[Task] = []
    usages: list[Usage] = []

    def add(name: str, task: Task, reads: tuple[int, ...] = (), num_bytes: int = 0) -> int:
        number = len(tasks)
        names.append(name)
        tasks.append(task)
        makes = (Make(buffer=number, num_bytes=num_bytes),) if num_bytes else ()
        usages.append(Usage(reads=(*reads, number) if num_bytes else reads, makes=makes))
        return number

    gathers, before, last = [], (), ()
    for layer in range(count):
        cast = add(f"c{layer}", Task())
        gather = add(f"g{layer}", Task(comm_us=GATHER_US, deps=(*last, cast)), num_bytes=UNIT_BYTES)
        wait = add(f"w{layer}", Task(deps=(gather,), waits_for=(gather,)), reads=(gather,))
        more = 10 * UNIT_BYTES if layer == crowded else 0
        before = (add(f"f{layer}", Task(us=LAYER_US, deps=(*before, wait)), reads=(gather,), num_bytes=more),)
        last = (gather,)
        gathers.append(gather)
    late = [False] * len(tasks)
    return Problem(tasks=tasks, late=late, usages=usages, gathers=gathers), names


def text(case: Problem, names: list[str], bound_bytes: int, reach: float = 1.0) -> str:
    return " ".join(names[number] for number in prefetch(case, bound_bytes, reach).numbers)


def test_a_gather_stands_before_what_hides_it_with_its_cast() -> None:
    case, names = layers(3)
    assert text(case, names, 2 * UNIT_BYTES) == "c0 g0 w0 c1 g1 f0 w1 c2 g2 f1 w2 f2"


def test_without_room_nothing_moves() -> None:
    case, names = layers(3)
    assert text(case, names, UNIT_BYTES) == " ".join(names)


def test_it_goes_as_far_as_it_is_asked_to_and_collectives_keep_their_order() -> None:
    case, names = layers(3)
    assert text(case, names, 3 * UNIT_BYTES, reach=9.0) == "c0 g0 c1 g1 c2 g2 w0 f0 w1 f1 w2 f2"


def test_what_has_moved_takes_room_from_gathers_behind_it() -> None:
    case, names = layers(3)
    assert text(case, names, 2 * UNIT_BYTES, reach=9.0) == "c0 g0 c1 g1 w0 f0 c2 g2 w1 f1 w2 f2"


def test_no_gather_moves_past_a_point_without_room() -> None:
    """Layer 1 fills the bound: gather 2 stays after it, gather 1 still stands before layer 0."""
    case, names = layers(4, crowded=1)
    bound_bytes = given_order(case).peak_bytes
    assert text(case, names, bound_bytes, reach=4.0) == "c0 g0 c1 g1 w0 f0 w1 f1 c2 g2 c3 g3 w2 f2 w3 f3"


def test_the_schedule_prefetches_within_the_bound() -> None:
    case, _ = layers(6, crowded=3)
    before = given_order(case)
    found = list_schedule(case, before.peak_bytes)
    assert (before.exposed_us, before.peak_bytes) == (6 * GATHER_US, 11 * UNIT_BYTES)
    # The first gather has nothing to hide it, and gather 4 no room before layer 3.
    assert (found.exposed_us, found.peak_bytes) == (2 * GATHER_US, 11 * UNIT_BYTES)
    assert found.reason.startswith("gathers start early")


def test_without_a_bound_nothing_but_the_first_gather_is_exposed() -> None:
    case, _ = layers(6, crowded=3)
    found = list_schedule(case, 1 << 40)
    assert found.exposed_us == GATHER_US


def test_no_gather_starts_earlier_than_it_was_placed() -> None:
    """While the device waits for one gather, the next ones must not start: each would take memory."""
    case, names = layers(6)
    found = list_schedule(case, 2 * UNIT_BYTES)
    assert found.peak_bytes == 2 * UNIT_BYTES
    place = {names[number]: index for index, number in enumerate(found.tasks)}
    assert all(place[f"g{layer}"] > place[f"f{layer - 2}"] for layer in range(2, 6))
    assert found.exposed_us == GATHER_US


def test_a_scheduler_that_starts_all_it_can_keeps_gathers_back() -> None:
    """Each depends on the task before it: else all would start at once, and the order given would be taken."""
    case, _ = layers(6)
    early = prefetch(case, 2 * UNIT_BYTES, 1.0)
    found = list_schedule(replace(early.problem, gathers=()), 2 * UNIT_BYTES)
    assert found.peak_bytes == 2 * UNIT_BYTES
    assert found.reason != "the order given"
