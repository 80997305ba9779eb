"""Tasks to be ordered, orders of them, and what an order is predicted to cost: plain numbers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from wholestep.cost.liveness import Usage, peak_bytes
from wholestep.cost.simulator import ALONE, Sharing, Task, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Tasks to be ordered.

    The order given is 0, 1, 2, ...; dependencies point backwards in it.
    """

    tasks: Sequence[Task]
    late: Sequence[bool]
    """Whether the task may run long after its place in the given order: no activation lives longer for it."""
    usages: Sequence[Usage]
    joins: Sequence[bool] = ()
    """Whether it may be part of an update of which a compiler makes one kernel; empty: none is."""
    gathers: Sequence[int] = ()
    """Collectives that bring what the computation reads, in the order given. The earlier one starts, the longer what it
    brings is alive."""
    pinned: Collection[int] = ()
    writable: Collection[int] = ()
    sharing: Sharing = ALONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The order found, what it is predicted to cost, and why it is this one."""

    tasks: tuple[int, ...]
    total_us: float
    exposed_us: float
    peak_bytes: int
    bound_bytes: int
    reason: str


def given_order(problem: Problem) -> Order:
    """The order given, and what it is predicted to cost."""
    return rate(problem, range(len(problem.tasks)), bound_bytes=0, reason="the order given")


def rate(problem: Problem, order: Sequence[int], *, bound_bytes: int, reason: str) -> Order:
    """An order with its predicted time and memory."""
    timeline = simulate(problem.tasks, order, sharing=problem.sharing)
    peak = peak_bytes(problem.usages, order, pinned=problem.pinned, writable=problem.writable)
    return Order(
        tasks=tuple(order), total_us=timeline.total_us, exposed_us=timeline.total_exposed_us,
        peak_bytes=peak, bound_bytes=bound_bytes, reason=reason,
    )  # fmt: skip
