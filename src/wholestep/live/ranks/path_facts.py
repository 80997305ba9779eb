"""PathFacts: what the calls of one rank have shown of a path, in terms that the other ranks understand.

[Note: what ranks tell each other]
A path is what a rank has seen of its own Python. If a weight is 0 on one rank in one call, that rank learns that the
number varies, and can run no backward ahead of it from then on; if one rank logs a value in front of the backward, its
piece ends there. The other ranks would go on as before, so that no two pieces fitted together again. So a rank that has
learned something says so at the end of the call, and all tell each other what they know of their paths. What varies on
one rank varies for all then, and where one rank asks for a value in many calls, all end their pieces.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from zlib import crc32

import torch

from wholestep.live.pieces.shared_calls import SharedCalls, is_shared
from wholestep.live.recording.path import Path
from wholestep.live.recording.record import NUMBER, Read, name_of

NumberPlace = tuple[int, str, int, int]
"""A number among the arguments: how many shared calls came before, the name of the function, which call of it since
then, which of its arguments. Ranks may make other calls of their own in between."""


_MAX_APART = 8
"""Calls between two that ask for a value at one place, for others to end their pieces there in every call."""


@dataclass(frozen=True, slots=True)
class PathFacts:
    """What one rank knows of one of its paths."""

    shared: int
    """The same on ranks whose calls take part in the same ones."""
    cuts: frozenset[int]
    """After how many shared calls Python asks for a value."""
    varying: frozenset[NumberPlace]
    """The numbers that are others in other calls."""

    def joined(self, others: Iterable[PathFacts]) -> PathFacts:
        """With what others know who have taken the same way."""
        same = [self, *(one for one in others if one.shared == self.shared)]
        cuts, varying = (one.cuts for one in same), (one.varying for one in same)
        return PathFacts(self.shared, frozenset().union(*cuts), frozenset().union(*varying))


def to_json(facts: Iterable[PathFacts]) -> str:
    """As text, for `from_json`."""
    return json.dumps([[one.shared, sorted(one.cuts), sorted(one.varying)] for one in facts])


def from_json(text: str) -> list[PathFacts]:
    """What `to_json` has written."""
    rows = json.loads(text)
    return [PathFacts(shared, frozenset(cuts), frozenset(map(tuple, numbers))) for shared, cuts, numbers in rows]


@dataclass(slots=True)
class _Known:
    """A path and what the ranks know of it."""

    path: Path
    places: list[int]
    """Its shared calls."""
    last_asked: dict[int, int] = field(default_factory=dict)
    """After how many shared calls this rank asked for a value, and in which call last."""
    cuts: frozenset[int] = frozenset()
    """Where this rank asks again and again, or another one does."""


class ToldPaths:
    """What this rank knows of the paths of one live step, and whether the others do not."""

    def __init__(self) -> None:
        self._known: dict[Path, _Known] = {}
        self._num_calls = 0
        self.has_news = False
        """Whether there is something that the others have not been told."""

    def note(self, path: Path, reads: Iterable[Read], paths: Collection[Path], *, is_changed: bool) -> None:
        """A call took a path and asked for values. `is_changed`: whether something varies that was a constant, of the
        path, which is among those that the step has now."""
        self._num_calls += 1
        known = self._known.get(path)
        self.has_news |= is_changed or known is None
        if known is None:
            known = self._known[path] = _Known(path, _shared_places(path))
        for cut in {bisect_left(known.places, read.position) for read in reads} - known.cuts:
            if self._num_calls - known.last_asked.get(cut, -_MAX_APART) <= _MAX_APART:
                known.cuts |= {cut}
                self.has_news = True
            known.last_asked[cut] = self._num_calls
        if len(self._known) > len(paths):
            self._known = {one: it for one, it in self._known.items() if one in paths}

    def facts(self, names: Callable[[torch.Tensor], str]) -> list[PathFacts]:
        """All that is known. `names`: of parameters and buffers, the same on all ranks."""
        return [_facts(known, names) for known in self._known.values()]

    def take(self, theirs: Sequence[PathFacts], names: Callable[[torch.Tensor], str]) -> list[Path]:
        """Takes over what the ranks know. Returns the paths on which a number varies by now that was a constant."""
        self.has_news, changed = False, []
        for known in self._known.values():
            facts, path, places = _facts(known, names).joined(theirs), known.path, known.places
            known.cuts = facts.cuts
            path.cut_before({places[k]: places[k - 1] for k in facts.cuts if 0 < k < len(places)})
            varying = [index for place, index in _numbers(path) if place in facts.varying]
            if constant := {index for index in varying if not path.is_varying(index)}:
                path.vary(constant)
                changed.append(path)
        return changed


def _facts(known: _Known, names: Callable[[torch.Tensor], str]) -> PathFacts:
    text = SharedCalls.of(known.path, range(len(known.path.records))).text(names)
    varying = frozenset(place for place, index in _numbers(known.path) if known.path.is_varying(index))
    return PathFacts(crc32(text.encode()), known.cuts, varying)


def _shared_places(path: Path) -> list[int]:
    return [number for number, record in enumerate(path.records) if is_shared(path, record)]


def _numbers(path: Path) -> Iterator[tuple[NumberPlace, int]]:
    """The numbers among the arguments of the calls of a path: their places, and which ones of the path they are."""
    num_shared, calls = 0, Counter[str]()
    for record in path.records:
        name = name_of(record.key.function)
        for argument, operand in enumerate(record.operands):
            if operand.kind == NUMBER:
                yield (num_shared, name, calls[name], argument), operand.key
        calls[name] += 1
        if is_shared(path, record):
            num_shared += 1
            calls.clear()
