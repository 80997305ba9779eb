"""The list scheduler, on numbers."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wholestep.cost.liveness import Ledger, Make, Usage, peak_bytes
from wholestep.cost.simulator import ALONE, Sharing, Task, simulate
from wholestep.passes.schedule.list_scheduler import ABOUT_AS_FAST, list_schedule, reachable_bytes
from wholestep.passes.schedule.ordering_problem import Order, Problem, given_order

NO_BOUND = 1 << 60


def problem(*entries: tuple[str, Task]) -> tuple[Problem, list[str]]:
    """Tasks with names; a name in capitals may run late."""
    names = [name for name, _ in entries]
    tasks = [task for _, task in entries]
    late = [name.isupper() for name in names]
    return Problem(tasks=tasks, late=late, usages=[Usage()] * len(tasks)), names


def named(order: Order, names: list[str]) -> str:
    return " ".join(names[number] for number in order.tasks)


def two_buckets(*, last_us: float = 30, update_us: float = 20) -> tuple[Problem, list[str]]:
    """Backward b2, b1, b0; bucket s1 after b2, bucket s0 after b0, and both updates at the end."""
    return problem(
        ("b2", Task(us=50)),
        ("b1", Task(us=50, deps=(0,))),
        ("b0", Task(us=50, deps=(1,))),
        ("s1", Task(comm_us=40, deps=(0,))),
        ("s0", Task(comm_us=last_us, deps=(2, 3))),
        ("w1", Task(waits_for=(3,), deps=(3,))),
        ("w0", Task(waits_for=(4,), deps=(4,))),
        ("U1", Task(us=update_us, deps=(5,))),
        ("U0", Task(us=update_us, deps=(6,))),
    )


def test_starts_are_early_and_waits_late():
    case, names = two_buckets(last_us=0)
    assert named(list_schedule(case, NO_BOUND), names) == "b2 s1 b1 w1 U1 b0 s0 w0 U0"


def test_an_update_is_kept_to_hide_the_last_bucket():
    case, names = two_buckets(last_us=20)
    found = list_schedule(case, NO_BOUND)
    assert named(found, names) == "b2 s1 b1 b0 s0 w1 U1 w0 U0"
    assert (found.total_us, found.exposed_us) == (190, 0)


def test_parts_of_an_update_that_become_one_kernel_run_together():
    case, names = problem(
        ("b1", Task(us=50)),
        ("s1", Task(comm_us=10, deps=(0,))),
        ("b0", Task(us=50, deps=(0,))),
        ("a0", Task(us=50, deps=(2,))),
        ("s0", Task(comm_us=20, deps=(1, 3))),
        ("w1", Task(waits_for=(1,), deps=(1,))),
        ("w0", Task(waits_for=(4,), deps=(4,))),
        ("DECAY", Task(us=20, deps=(5,))),
        ("STEP", Task(us=20, deps=(7,))),
        ("U0", Task(us=20, deps=(6,))),
    )
    assert named(list_schedule(case, NO_BOUND), names) == "b1 s1 b0 w1 DECAY a0 s0 STEP w0 U0"
    whole = replace(case, joins=[name.isupper() for name in names])
    assert named(list_schedule(whole, NO_BOUND), names) == "b1 s1 b0 a0 s0 w1 DECAY STEP w0 U0"


def test_of_orders_about_as_fast_the_one_that_exposes_least_is_taken():
    case, names = two_buckets(last_us=0.9)  # of 190
    found = list_schedule(case, NO_BOUND)
    assert named(found, names) == "b2 s1 b1 b0 s0 w1 U1 w0 U0"
    assert (found.total_us, found.exposed_us) == (190, 0)


def test_what_nothing_waits_for_fills_the_time():
    case, names = problem(
        ("N", Task(us=10)),  # a counter of the optimizer
        ("b", Task(us=50)),
        ("s", Task(comm_us=10, deps=(1,))),
        ("w", Task(waits_for=(2,), deps=(2,))),
        ("U", Task(us=5, deps=(0, 3))),
    )
    assert named(list_schedule(case, NO_BOUND), names) == "b s N w U"


def test_independent_work_runs_beside_a_collective_that_the_step_waits_for_at_once():
    case, names = problem(
        ("s", Task(comm_us=30)),
        ("w", Task(waits_for=(0,), deps=(0,))),
        ("r", Task(us=5, deps=(1,))),
        ("c", Task(us=40)),
        ("d", Task(us=5, deps=(2, 3))),
    )
    assert named(list_schedule(case, NO_BOUND), names) == "s c w r d"


def test_a_start_that_waits_for_another_collective_is_not_forgotten():
    case, _ = problem(
        ("s", Task(comm_us=30)),
        ("w", Task(waits_for=(0,), deps=(0,))),
        ("t", Task(comm_us=30, deps=(1,))),
        ("v", Task(waits_for=(2,), deps=(2,))),
        ("c", Task(us=100)),
        ("d", Task(us=5, deps=(3,))),
    )
    found = list_schedule(case, NO_BOUND)
    assert found.tasks.index(2) < found.tasks.index(5)
    assert sorted(found.tasks) == list(range(6))


def test_of_equally_fast_orders_the_smallest_is_taken():
    """The early update would take 100 bytes while 100 others live; after the backward there is room."""
    case, names = two_buckets(last_us=0)
    usages = [Usage()] * 9
    usages[0] = Usage(makes=(Make(buffer=0, num_bytes=100),))
    usages[2] = Usage(reads=(0,))
    usages[7] = Usage(reads=(1,), makes=(Make(buffer=1, num_bytes=100),))
    roomy = Problem(tasks=case.tasks, late=case.late, usages=usages)
    assert named(list_schedule(roomy, NO_BOUND), names) == "b2 s1 b1 b0 s0 w1 U1 w0 U0"


def test_the_bound_puts_work_off():
    """What could hide the collective takes 100 bytes while 100 others live, which only the wait sets free."""
    tasks = [Task(us=1), Task(comm_us=30), Task(deps=(1,), waits_for=(1,)), Task(us=5, deps=(0, 2)), Task(us=40)]
    usages = [Usage(makes=(Make(buffer=0, num_bytes=100),)), Usage(), Usage(), Usage(reads=(0,))]
    usages.append(Usage(reads=(1,), makes=(Make(buffer=1, num_bytes=100),)))
    case = Problem(tasks=tasks, late=[False, False, False, False, True], usages=usages)
    free, tight = list_schedule(case, 200), list_schedule(case, 100)
    assert (free.tasks, free.total_us, free.peak_bytes) == ((1, 0, 4, 2, 3), 46, 200)
    assert (tight.tasks, tight.total_us, tight.peak_bytes) == ((1, 0, 2, 3, 4), 75, 100)


def test_without_an_order_that_keeps_the_bound_the_smallest_is_taken_and_named():
    """As written 200 bytes live at once; what needs 100 may also stand after the wait."""
    tasks = [Task(us=1), Task(comm_us=30), Task(us=40), Task(deps=(1,), waits_for=(1,)), Task(us=5, deps=(0, 3))]
    usages = [Usage(makes=(Make(buffer=0, num_bytes=100),)), Usage()]
    usages += [Usage(reads=(1,), makes=(Make(buffer=1, num_bytes=100),)), Usage(), Usage(reads=(0,))]
    case = Problem(tasks=tasks, late=[False, False, True, False, False], usages=usages)
    assert given_order(case).peak_bytes == 200
    assert list_schedule(case, 50).peak_bytes == 100
    assert reachable_bytes(case, 50) == 100


@st.composite
def problems(draw) -> Problem:
    """A random step: computation in a DAG, collectives with their waits, updates at the end, memory for all of it.

    Some of the collectives may be gathers, which take memory from their start on.
    """
    rng = random.Random(draw(st.integers(0, 10**9)))
    count = draw(st.integers(2, 40))
    tasks: list[Task] = []
    late: list[bool] = []
    open_starts: list[int] = []
    last_start: dict[str, int] = {}
    for number in range(count):
        deps = tuple(sorted(rng.sample(range(number), min(number, rng.randint(0, 2)))))
        deps = tuple(dep for dep in deps if tasks[dep].comm_us is None)
        roll = rng.random()
        if roll < 0.2 and number:
            link = rng.choice("ab")
            order = (last_start[link],) if link in last_start else ()
            tasks.append(Task(comm_us=float(rng.randint(0, 60)), deps=tuple(sorted({*deps, *order})), link=link))
            last_start[link] = number
            open_starts.append(number)
        elif roll < 0.45 and open_starts:
            start = rng.choice(open_starts)
            tasks.append(Task(deps=(start,), waits_for=(start,)))
        else:
            tasks.append(Task(us=float(rng.randint(0, 40)), deps=deps))
        late.append(number > 0.6 * count and rng.random() < 0.7)
    usages = []
    for number, task in enumerate(tasks):
        reads = (*(dep for dep in task.deps), number)
        onto = task.deps[0] if task.deps and rng.random() < 0.4 else None
        usages.append(Usage(reads=reads, makes=(Make(buffer=number, num_bytes=rng.randint(0, 50), onto=onto),)))
    sharing = rng.choice([ALONE, Sharing(compute=1.5, collective=1.5)])
    pinned = [number for number in range(count) if rng.random() < 0.1]
    starts = [number for number, task in enumerate(tasks) if task.comm_us is not None]
    share = rng.choice([0.0, 0.5, 1.0])
    gathers = [number for number in starts if rng.random() < share]
    return Problem(tasks=tasks, late=late, usages=usages, gathers=gathers, pinned=pinned, sharing=sharing)


@settings(max_examples=1000)
@given(problems(), st.floats(1.0, 1.5))
def test_every_order_keeps_the_rules(case, slack):
    before = given_order(case)
    bound_bytes = int(before.peak_bytes * slack)
    found = list_schedule(case, bound_bytes)
    place = {number: index for index, number in enumerate(found.tasks)}
    assert sorted(found.tasks) == list(range(len(case.tasks)))
    for number, task in enumerate(case.tasks):
        assert all(place[dep] < place[number] for dep in (*task.deps, *task.waits_for))
    for link in "ab":
        order = [number for number in found.tasks if case.tasks[number].link == link]
        assert order == sorted(order)
    assert peak_bytes(case.usages, found.tasks, pinned=case.pinned) == found.peak_bytes <= bound_bytes
    assert simulate(case.tasks, found.tasks, sharing=case.sharing).total_us == found.total_us
    assert found.total_us <= ABOUT_AS_FAST * before.total_us
    assert list_schedule(case, bound_bytes) == found


@settings(max_examples=1000, derandomize=True)  # one in 150 keeps only the peak of the order given
@given(problems(), st.floats(0.0, 1.0))
def test_a_bound_that_is_named_can_be_kept(case, share):
    bound_bytes = int(share * given_order(case).peak_bytes)
    named_bytes = reachable_bytes(case, bound_bytes)
    assert list_schedule(case, named_bytes).peak_bytes <= named_bytes <= given_order(case).peak_bytes


@settings(max_examples=50)
@given(problems())
def test_an_order_that_was_found_is_not_made_worse(case):
    """Scheduling what has been scheduled: at most as slow, in the same bound."""
    found = list_schedule(case, NO_BOUND)
    number_of = {old: new for new, old in enumerate(found.tasks)}

    def renamed(task: Task) -> Task:
        deps = tuple(sorted(number_of[dep] for dep in task.deps))
        waits = tuple(number_of[start] for start in task.waits_for)
        return Task(us=task.us, deps=deps, comm_us=task.comm_us, link=task.link, waits_for=waits)

    again = Problem(
        tasks=[renamed(case.tasks[old]) for old in found.tasks], late=[case.late[old] for old in found.tasks],
        usages=[case.usages[old] for old in found.tasks], pinned=case.pinned, sharing=case.sharing,
    )  # fmt: skip
    assert list_schedule(again, found.peak_bytes).total_us <= ABOUT_AS_FAST * found.total_us


def looks_counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on, of which tasks a scheduler asks what they take."""
    looks: list[int] = []
    needed_bytes = Ledger.needed_bytes

    def counted(ledger: Ledger, task: int) -> int:
        looks.append(task)
        return needed_bytes(ledger, task)

    monkeypatch.setattr(Ledger, "needed_bytes", counted)
    return looks


def test_updates_that_do_not_fit_are_looked_at_no_more_than_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward waits for gathers, and each of its steps frees memory, but never enough for an update."""
    number = 40
    entries: list[tuple[str, Task]] = []
    for i in range(number):
        entries += [(f"g{i}", Task(comm_us=10)), (f"w{i}", Task(waits_for=(3 * i,), deps=(3 * i,)))]
        entries.append((f"b{i}", Task(us=1, deps=(3 * i + 1, 3 * i - 1) if i else (1,))))
    case, names = problem(*entries, *((f"U{i}", Task(us=5)) for i in range(number)))
    usages = [Usage()] * len(names)
    for i in range(number):
        usages[3 * i + 2] = Usage(reads=(i,), makes=(Make(buffer=i + 1, num_bytes=99 - i),))
        usages[3 * number + i] = Usage(makes=(Make(buffer=1000 + i, num_bytes=230),))
    case = replace(case, usages=usages)
    looks = looks_counted(monkeypatch)
    found = list_schedule(case, 240)
    assert sorted(found.tasks) == list(range(len(names)))
    assert len(looks) < 30 * number  # a multiple of number ** 2, with each of them again after each step


def test_one_update_that_fits_has_no_others_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of the backward frees memory for one update, whichever it is."""
    number = 40
    entries: list[tuple[str, Task]] = [(f"f{i}", Task(us=1)) for i in range(number)]
    for i in range(number):
        at = number + 3 * i
        entries += [(f"g{i}", Task(comm_us=10)), (f"w{i}", Task(waits_for=(at,), deps=(at,)))]
        entries.append((f"b{i}", Task(us=1, deps=(at + 1, at - 1) if i else (at + 1,))))
    case, names = problem(*entries, *((f"U{i}", Task(us=5)) for i in range(number)))
    usages = [Usage()] * len(names)
    for i in range(number):
        usages[i] = Usage(makes=(Make(buffer=i, num_bytes=60),))
        usages[number + 3 * i + 2] = Usage(reads=(i,))
        usages[4 * number + i] = Usage(makes=(Make(buffer=1000 + i, num_bytes=60),))
    case = replace(case, usages=usages, pinned={1000 + i for i in range(number)})
    looks = looks_counted(monkeypatch)
    found = list_schedule(case, 60 * number + 30)
    assert sorted(found.tasks) == list(range(len(names)))
    assert len(looks) < 30 * number
