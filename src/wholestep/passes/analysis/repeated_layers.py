"""Finds the layers that a run of nodes repeats, so that equal segments are compiled once.

A compiler takes as long as there are nodes, however often they are the same::

    embed, 12 x [norm, mm, attention, mm, norm, mm, gelu, mm], norm, mm     ->     embed, norm
                                                                                   mm, attention, ... norm     11 times
                                                                                   mm, attention, ... mm

A cut stands right before a call of a library, into which nothing is fused anyway. Of those calls in a repetition the
one is taken across which the fewest bytes are alive.

Source of the idea: regional compilation of repeated blocks, as PyTorch's documentation of ``torch.compile`` recommends
it by hand. Here the graph shows where the blocks are.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch.fx as fx

from wholestep.ir import node_meta, op_info
from wholestep.ir.sizes import shape_text
from wholestep.passes.analysis.users import readers_through_views

MIN_CALLS = 8
"""Of a piece: below that there is little to compile."""
_CANDIDATES = 64
"""How many lengths of a repetition are tried, those of most calls first."""
_LOOKS_BACK = 8
"""How often every kind of call may stand in a repetition that is found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """Entries from `start` to `end` of a sequence, which repeat in steps of `period`."""

    start: int
    end: int
    period: int


def longest_repetition(kinds: Sequence[int]) -> Repetition | None:
    """The longest part of a sequence that repeats itself at least once; None if there is none.

    Of periods that reach equally far the shortest is taken.
    """
    last: dict[int, deque[int]] = defaultdict(lambda: deque(maxlen=_LOOKS_BACK))
    gaps: Counter[int] = Counter()
    for place, kind in enumerate(kinds):
        gaps.update(place - before for before in last[kind])
        last[kind].append(place)
    candidates = [one for period, _ in gaps.most_common(_CANDIDATES) if (one := _longest(kinds, period)) is not None]
    return min(candidates, key=lambda one: (one.start - one.end, one.period), default=None)


def _longest(kinds: Sequence[int], period: int) -> Repetition | None:
    best = begin = 0
    where = 0
    for place in range(len(kinds) - period):
        if kinds[place] != kinds[place + period]:
            begin = place + 1
        elif place + 1 - begin > best:
            best, where = place + 1 - begin, begin
    return Repetition(start=where, end=where + best + period, period=period) if best >= period else None


def best_unit(
    kinds: Sequence[int], costs: Sequence[int], may_cut: Callable[[int], bool], *, least: int = MIN_CALLS
) -> tuple[int, ...]:
    """What a sequence repeats, from where it is best cut; empty if it repeats nothing.

    Args:
        kinds: entries with the same number may be the same.
        costs: what a cut before each entry costs.
        may_cut: whether one may stand before an entry.
        least: entries of a unit, which is as many periods long as that takes.
    """
    repetition = longest_repetition(kinds)
    if repetition is None:
        return ()
    length = repetition.period * -(-least // repetition.period)
    choices = []
    for offset in range(repetition.start, repetition.start + repetition.period):
        places = range(offset, repetition.end - length + 1, length)
        if len(places) > 1 and all(map(may_cut, places)):
            choices.append((sum(costs[place] for place in places), offset))
    if not choices:
        return ()
    _, offset = min(choices)
    return tuple(kinds[offset : offset + length])


def occurrences(kinds: Sequence[int], unit: tuple[int, ...], may_cut: Callable[[int], bool]) -> list[int]:
    """Where a unit begins, one after the other, with cuts allowed at both of its ends."""
    starts, place, length = [], 0, len(unit)
    while unit and place + length <= len(kinds):
        fits = kinds[place] == unit[0] and tuple(kinds[place : place + length]) == unit
        if fits and all(map(may_cut, (place, place + length))):
            starts.append(place)
            place += length
        else:
            place += 1
    return starts


def split_at_repeats(
    runs: Sequence[list[fx.Node]],
    *,
    by_library: Callable[[fx.Node], bool],
    updates: Collection[fx.Node],
    uncut: Collection[fx.Node] = (),
) -> list[list[fx.Node]]:
    """The runs in pieces, in order. A unit that one run repeats is cut out of all of them.

    Args:
        runs: nodes that a compiler gets together, in the order of the graph, without views.
        by_library: whether the compiler leaves a node to a library.
        updates: nodes whose values are written to inputs, of these runs or not.
        uncut: nodes whose runs stay as they are.
    """
    numbers: dict[Any, int] = {}

    def number(node: fx.Node) -> int:
        return numbers.setdefault(node if node in uncut else _kind(node), len(numbers))

    sequences = [([number(node) for node in run], _CutPoints(run, by_library, updates)) for run in runs]
    units = units_of(sequences)
    return [
        run[start:end]
        for run, (kinds, cuts) in zip(runs, sequences, strict=True)
        for start, end in pairwise(_ends(kinds, cuts, units))
    ]


def units_of(sequences: Sequence[tuple[Sequence[int], _CutPoints]]) -> list[tuple[int, ...]]:
    """The units that the sequences repeat.

    Each sequence comes with where it may be cut; what one unit leaves is searched for more.
    """
    units: list[tuple[int, ...]] = []
    for kinds, cuts in sequences:
        gaps = _gaps(kinds, cuts, units)
        while gaps:
            start, end = gaps.pop()
            new = best_unit(kinds[start:end], cuts.alive_bytes[start : end + 1], cuts.shifted(start))
            if new and new not in units:  # a known one does not fit here, since another one overlaps it
                units.append(new)
                gaps = _gaps(kinds, cuts, units)
    return units


def _ends(kinds: Sequence[int], cuts: _CutPoints, units: Sequence[tuple[int, ...]]) -> list[int]:
    """Where pieces of a run begin, and its end."""
    ends = {0, len(kinds)}
    for one in units:
        ends.update(end for start in occurrences(kinds, one, cuts) for end in (start, start + len(one)))
    return sorted(ends)


def _gaps(kinds: Sequence[int], cuts: _CutPoints, units: Sequence[tuple[int, ...]]) -> list[tuple[int, int]]:
    """Pieces that are no units."""
    ends = pairwise(_ends(kinds, cuts, units))
    return [(start, end) for start, end in ends if tuple(kinds[start:end]) not in units]


def _kind(node: fx.Node) -> Any:
    """What nodes of different repetitions have in common."""
    shapes = tuple(
        (shape_text(one.shape), shape_text(one.stride()), one.dtype, one.device) for one in node_meta.tensors(node)
    )
    constants = repr([None if isinstance(arg, fx.Node) else arg for arg in node.args if not _holds_nodes(arg)])
    return (str(node.target), shapes, constants)


def _holds_nodes(arg: Any) -> bool:
    return isinstance(arg, (list, tuple)) and any(isinstance(one, fx.Node) for one in arg)


class _CutPoints:
    """Where a run may be cut: before calls of libraries.

    Not where an update of an input would stand before a call that may fail.
    """

    def __init__(
        self, run: Sequence[fx.Node], by_library: Callable[[fx.Node], bool], updates: Collection[fx.Node]
    ) -> None:
        places = {node: place for place, node in enumerate(run)}
        self._bytes = [node_meta.num_bytes(node) for node in run]
        self._readers = [[places[user] for user, _ in readers_through_views(node) if user in places] for node in run]
        self._by_library = [by_library(node) for node in run]
        self._first_source = [len(run)] * len(run)
        for place, readers in enumerate(self._readers):
            for reader in readers:
                self._first_source[reader] = min(self._first_source[reader], place)
        self._first_update = min((place for place, node in enumerate(run) if node in updates), default=len(run))
        self._last_risk = max((place for place, node in enumerate(run) if op_info.may_fail(node.target)), default=-1)

    def __call__(self, place: int) -> bool:
        """Whether a cut may stand before the node of this place."""
        if self._first_update < place <= self._last_risk:
            return False  # inputs are written after the last call that may refuse its values
        for at in range(place, len(self._by_library)):
            if self._first_source[at] < place:  # the first node that reads what is before the cut
                return self._by_library[at]
        return True

    def shifted(self, start: int) -> Callable[[int], bool]:
        """The same for places counted from `start`."""
        return lambda place: self(start + place)

    @cached_property
    def alive_bytes(self) -> list[int]:
        """Per place, bytes of values of the run that are made before it and read there or after it."""
        change = [0] * (len(self._bytes) + 1)
        for place, (num_bytes, readers) in enumerate(zip(self._bytes, self._readers, strict=True)):
            change[place + 1] += num_bytes
            change[max(readers, default=place) + 1] -= num_bytes
        return list(accumulate(change))
