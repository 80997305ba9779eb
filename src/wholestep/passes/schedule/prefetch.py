"""Prefetch of gathers under a bound of memory, on plain numbers.

Before and after, with a gather for each of two layers::

    gather 0; wait; layer 0                       gather 0; wait
    gather 1; wait; layer 1          ->           gather 1; layer 0     # if there is room for it
                                                  wait; layer 1

[Note: look-ahead]
What a gather brings is alive from its start on, so starting one early can break the bound much later, at the peak. The
memory of the order given is known at every point. A gather moves to the front as long as there is room for what it
brings at all points it passes, and until what runs between can hide it. Those that are needed first move first.

Source: prefetch of FSDP units (Zhao et al., "PyTorch FSDP", 2023), which is by a count of units and knows no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from wholestep.cost.liveness import Ledger
from wholestep.cost.simulator import Task
from wholestep.passes.schedule.ordering_problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetched:
    """A problem whose order given starts gathers early, and in which none may start earlier than in that."""

    problem: Problem
    numbers: tuple[int, ...]
    """The number that each task has in the problem this was made from."""

    def original(self, order: Sequence[int]) -> tuple[int, ...]:
        """An order of these tasks in the numbers of the problem this was made from."""
        return tuple(self.numbers[number] for number in order)


def prefetch(problem: Problem, bound_bytes: int, reach: float) -> Prefetched:
    """Moves gathers to the front; see the note above.

    Args:
        bound_bytes: what may live while tasks run. Where the order given needs more, no gather moves past that point.
        reach: a gather moves until the computation it passes takes as many times as long as itself.
    """
    users = _users(problem)
    live_bytes = _live_bytes(problem)
    places = dict[int, int]()
    for gather in problem.gathers:
        group = _with_own_inputs(problem, users, gather)
        place = _place(problem, group, places, live_bytes, bound_bytes=bound_bytes, reach=reach)
        for number in range(place, gather):
            live_bytes[number] += _made_bytes(problem, group)
        places.update(dict.fromkeys(group, place))
    order = tuple(sorted(range(len(problem.tasks)), key=lambda number: _key(number, places)))
    return Prefetched(problem=_renumbered(problem, order, frozenset(places)), numbers=order)


def _key(number: int, places: dict[int, int]) -> tuple[int, bool, int]:
    """What moves stands before the task in whose place it is."""
    return places.get(number, number), number not in places, number


def _place(
    problem: Problem, group: set[int], places: dict[int, int], live_bytes: list[int], *, bound_bytes: int, reach: float
) -> int:
    """The task before which the gather and what only it reads may stand."""
    needed = {dep for number in group for dep in problem.tasks[number].deps} - group
    earliest = max((places[dep] if dep in places else dep + 1 for dep in needed), default=0)
    gather = place = max(group)
    wanted_us = reach * problem.sharing.collective * (problem.tasks[gather].comm_us or 0.0)
    num_bytes = _made_bytes(problem, group)
    hidden_us = 0.0
    while place > earliest and hidden_us < wanted_us and live_bytes[place - 1] + num_bytes <= bound_bytes:
        place -= 1
        hidden_us += problem.tasks[place].us if place not in group else 0.0
    return place


def _made_bytes(problem: Problem, group: set[int]) -> int:
    return sum(make.num_bytes for number in group for make in problem.usages[number].makes)


def _with_own_inputs(problem: Problem, users: list[list[int]], gather: int) -> set[int]:
    """The gather and computation that only it reads, such as casts."""
    group, stack = {gather}, [gather]
    while stack:
        for dep in problem.tasks[stack.pop()].deps:
            task = problem.tasks[dep]
            if task.comm_us is None and not task.waits_for and group.issuperset(users[dep]):
                group.add(dep)
                stack.append(dep)
    return group


def _renumbered(problem: Problem, order: tuple[int, ...], hoisted: frozenset[int]) -> Problem:
    """The problem with its tasks in another order.

    What has moved depends on the task before it, so that it starts no earlier.
    """
    new_number = {number: place for place, number in enumerate(order)}
    tasks: list[Task] = []
    before: tuple[int, ...] = ()
    for place, number in enumerate(order):
        task = problem.tasks[number]
        deps = {new_number[dep] for dep in task.deps}
        if number in hoisted:
            deps.update(before)
        elif not problem.late[number] and not task.waits_for and task.comm_us is None:
            before = (place,)
        waits_for = tuple(new_number[start] for start in task.waits_for)
        tasks.append(replace(task, deps=tuple(sorted(deps)), waits_for=waits_for))
    return replace(
        problem, tasks=tasks, late=[problem.late[number] for number in order],
        usages=[problem.usages[number] for number in order],
        joins=[problem.joins[number] for number in order] if problem.joins else (),
        gathers=[new_number[number] for number in problem.gathers],
    )  # fmt: skip


def _users(problem: Problem) -> list[list[int]]:
    users: list[list[int]] = [[] for _ in problem.tasks]
    for number, task in enumerate(problem.tasks):
        for dep in task.deps:
            users[dep].append(number)
    return users


def _live_bytes(problem: Problem) -> list[int]:
    """What is alive while each task of the order given runs."""
    return list(_live(problem))


def _live(problem: Problem) -> Iterator[int]:
    ledger = Ledger(problem.usages, pinned=problem.pinned, writable=problem.writable)
    for number in range(len(problem.tasks)):
        yield ledger.live_bytes + ledger.needed_bytes(number)
        ledger.run(number)
