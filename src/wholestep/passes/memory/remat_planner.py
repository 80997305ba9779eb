"""Which forward values to keep for the backward, and which to compute again there. Plain numbers.

What a plan does and needs is worked out in `remat_evaluator`, where the words for it are explained.

Note: the choice
    The bytes at the moment of the peak have to fall below the budget. What may be dropped there are buffers that are
    alive only for a late call; each frees its bytes and costs the time of the calls that are not done again so far.
    The cheapest that free enough are a knapsack. Then every moment of the step is weighed exactly: what is done again
    lives, too, and what leads to it. Where that leaves more than the budget at a moment, even if all that is still kept
    were dropped, the buffers to blame are found by halving, and stay. If the peak is elsewhere now the next round
    begins. In the end buffers are kept after all where the budget allows it. Where few buffers may be dropped at all,
    every choice is weighed instead.

    In a chain of layers this drops what is inside of the layers, the cheap first, and only then what the layers hand
    to each other, the earliest first, up to where recomputing a stretch would take more than the budget: that one
    stays, as a checkpoint.

Sources of the ideas: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016 (stretches between
checkpoints); Jain et al., "Checkmate", 2020 (any value of any graph may be dropped, weighed by measured cost).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations

from wholestep.passes.memory import remat_evaluator
from wholestep.passes.memory.knapsack import Item, cheapest
from wholestep.passes.memory.remat_evaluator import Plan, Problem, added_cost, evaluate, first_late_reads

SEARCHES = 4
"""Budgets that are tried to find the smallest one that can be kept, where the one asked for cannot."""
FEW = 8
"""Up to as many buffers that may be dropped, every choice of them is weighed, and the plan is the best there is."""


class Planner:
    """Finds plans for the calls of one step."""

    def __init__(self, problem: Problem) -> None:
        self.live = remat_evaluator.liveness(problem)
        self.candidates = remat_evaluator.candidates(self.live, problem.kept)
        self.banned: set[int] = set()
        self.baseline = evaluate(self.live, frozenset())
        """The plan that keeps everything."""

    def plan(self, budget_bytes: int) -> Plan:
        """The plan that keeps the budget in little time; if none is found, the one with the smallest peak."""
        if len(self.candidates) <= FEW:
            return self._best_of_all(budget_bytes)
        low_bytes = max(budget_bytes, self.lower_bound_bytes())
        best = self._plan(low_bytes)
        for _ in range(SEARCHES):
            if best.peak_bytes <= low_bytes:
                break
            middle_bytes = (low_bytes + best.peak_bytes) // 2
            other = self._plan(middle_bytes)
            low_bytes = low_bytes if other.peak_bytes <= middle_bytes else middle_bytes
            best = min(best, other, key=lambda one: one.peak_bytes)
        return self._restore(best, max(budget_bytes, best.peak_bytes))

    def _best_of_all(self, budget_bytes: int) -> Plan:
        """The plan that keeps the budget in the least time; if none does, the one with the smallest peak."""
        counts = range(len(self.candidates) + 1)
        choices = (choice for count in counts for choice in combinations(self.candidates, count))
        plans = (evaluate(self.live, frozenset(choice)) for choice in choices)
        return min(plans, key=lambda one: (max(one.peak_bytes, budget_bytes), one.us, one.peak_bytes))

    def lower_bound_bytes(self) -> int:
        """No plan has a smaller peak than this."""
        self.banned.clear()
        return max(self._lower_bounds(self.baseline), default=0)

    def _lower_bounds(self, now: Plan) -> list[int]:
        """By moment: the bytes alive if everything that may still be dropped were, and second calls took no memory."""
        first_read, change = first_late_reads(self.live, now), [0] * (len(now.live_bytes) + 1)
        for buffer in self.candidates:
            # The last early call to read it may then leave its result in that memory.
            start, end = self.live.last_early_reads[buffer], first_read.get(buffer, -1)
            if start < end and buffer not in now.dropped and buffer not in self.banned:
                change[start] -= self.live.size_bytes[buffer]
                change[end] += self.live.size_bytes[buffer]
        return [live + less for live, less in zip(now.live_bytes, accumulate(change), strict=False)]

    def _plan(self, budget_bytes: int) -> Plan:
        """Drops what the budget asks for, and perhaps more."""
        now, progress = self.baseline, False
        self.banned.clear()
        while now.peak_bytes > budget_bytes:
            items = list(self._items(now))
            if items:
                buffers = self._cheapest(items, now.peak_bytes - budget_bytes)
                before, now = now, self._drop(now, buffers, budget_bytes)
                progress = progress or now is not before
            elif progress and self.banned:  # what lifted a lower bound before may not do so any more
                self.banned.clear()
                progress = False
            else:
                break
        return now

    def _items(self, now: Plan) -> Iterator[tuple[int, Item]]:
        """The buffers that would free memory at the moment of the peak, with what they free and what that costs."""
        moment = now.live_bytes.index(now.peak_bytes)
        first_read = first_late_reads(self.live, now)
        for buffer in self.candidates:
            idle = self.live.last_early_reads[buffer] < moment < first_read.get(buffer, -1)
            if not idle or buffer in now.dropped or buffer in self.banned:
                continue
            us, more_bytes = added_cost(self.live, now, buffer)
            if self.live.size_bytes[buffer] > more_bytes:
                yield buffer, Item(num_bytes=self.live.size_bytes[buffer] - more_bytes, us=us)

    def _cheapest(self, items: Sequence[tuple[int, Item]], need_bytes: int) -> list[int]:
        """The cheapest buffers that free enough, those of the lowest price first, of equal ones the earliest."""
        chosen = [items[index] for index in cheapest([item for _, item in items], need_bytes)]
        return [buffer for buffer, _ in sorted(chosen, key=lambda one: (one[1].us / one[1].num_bytes, one[0]))]

    def _drop(self, now: Plan, buffers: Sequence[int], budget_bytes: int) -> Plan:
        """Drops the buffers but those that lift a lower bound over the budget, which are banned."""
        new = evaluate(self.live, now.dropped.union(buffers))
        pairs = zip(self._lower_bounds(new), self._lower_bounds(now), strict=True)
        if not any(least > before and least > budget_bytes for least, before in pairs):
            return new
        if len(buffers) == 1:
            self.banned.update(buffers)
            return now
        half = len(buffers) // 2
        return self._drop(self._drop(now, buffers[:half], budget_bytes), buffers[half:], budget_bytes)

    def _restore(self, now: Plan, bound_bytes: int) -> Plan:
        """Keeps dropped buffers after all where the bound allows it, those first that take longest to make again."""
        calls, makers = self.live.calls, self.live.makers
        for buffer in sorted(now.dropped, key=lambda buffer: (-(calls[makers[buffer]].recompute_us or 0.0), buffer)):
            new = evaluate(self.live, now.dropped - {buffer})
            if new.peak_bytes <= bound_bytes:
                now = new
        return now
