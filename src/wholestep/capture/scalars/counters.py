"""Python numbers that a step itself moves: ``group["step"] += 1``, ``self.seen += len(x)``.

[Note: counters]
A trace that finds such a number changed is thrown away, and the next one runs with a symbol in its place. The symbol is
read of a *box*, a 0-d tensor on the CPU that is state of the step like the ``step`` of torch's Adam, and what the step
leaves in the place of the number is written to the box, in the graph. Between calls the number itself is what counts:
the box takes it over before a call, and the number is what is in the box behind it.

[Note: moved from outside]
A number that is another one in a later call, ``self.temperature = ...`` between the calls or ``step(x, y, beta)``, is a
counter too (`capture/retrace_policy.py`), which the step leaves as it is. Those among the arguments stand in a dict of
the scene, from which the arguments of the trace are taken.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from wholestep.capture.python.container_views import CellView, ClassView, ContentView, SlotsView
from wholestep.capture.python.snapshot import Snapshot, same
from wholestep.capture.scalars.host_scalars import expression_key
from wholestep.errors import CaptureError

_DTYPES: dict[type, torch.dtype] = {int: torch.int64, float: torch.float64}
_MOST = torch.iinfo(torch.int64).max
_MISSING = object()


@dataclass(frozen=True, slots=True)
class ScalarLocation:
    """Where Python keeps one number: a key of a dict, an item of a list, a variable of a closure."""

    container: Any
    key: Any
    path: str
    """How a person would write it."""
    kind: type
    """What the step leaves there: int or float."""
    position: int | None = None
    """In a list or tuple under the key, which the step replaces by another one; None where the key has the number."""
    shared: str = ""
    """Places with the same text and number are one counter: what an optimizer counts for each of its parameters."""

    @property
    def identity(self) -> Hashable:
        """The same for the same place, however it was reached."""
        return identity(self.container), self.key, self.position

    def held(self) -> Any:
        """What is under the key now."""
        try:
            return self.container[self.key]
        except (KeyError, IndexError, AttributeError, ValueError):
            return _MISSING

    def read(self) -> Any:
        """The number that is there now, or what is there instead."""
        held = self.held()
        if self.position is None:
            return held
        return held[self.position] if _is_row(held) and self.position < len(held) else _MISSING

    def write(self, number: Any) -> None:
        """Puts a number there."""
        if self.position is None:
            write_at(self.container, self.key, number)
        else:
            items = list(self.held())
            items[self.position] = number
            write_at(self.container, self.key, type(self.held())(items))


VaryingValue = Hashable
"""What is another one in other calls: a number in a `ScalarLocation`, or a leaf of the arguments."""


def write_at(container: Any, key: Any, thing: Any) -> None:
    """Puts a thing under a key, into whatever the container stands for."""
    if isinstance(container, (CellView, SlotsView)):
        container.update({key: thing})
    else:
        container[key] = thing


def identity(container: Any) -> int:
    """A number of what lies behind a container."""
    if isinstance(container, CellView):
        return id(container.cell)
    return id(container.thing if isinstance(container, SlotsView) else container)


def scalar_locations(
    container: Any, key: Any, path: str, pair: tuple[Any, Any], shared: str = ""
) -> list[ScalarLocation]:
    """The places of numbers that a step has changed; none for what is no number. `pair`: what was there, what is there.

    A list or tuple of numbers that another one has replaced, just as long, is one place per item.
    """
    then, now = pair
    if isinstance(container, (ClassView, ContentView)) or not fits_a_box(then):
        return []
    if type(then) is type(now) and _is_row(then) and len(then) == len(now) > 0:
        kinds = [_kind(one) if type(before) in _DTYPES else None for before, one in zip(then, now, strict=True)]
        found = [
            ScalarLocation(container, key, f"{path}[{i}]", kind, i) for i, kind in enumerate(kinds) if kind is not None
        ]
        return found if len(found) == len(kinds) else []
    number = _kind(now) if type(then) in _DTYPES else None
    if number is None:
        return []
    return [ScalarLocation(container, key, path, float if type(then) is float else number, shared=shared)]


def fits_a_box(number: Any) -> bool:
    """False for an int of more than 64 bits."""
    return type(number) is not int or abs(number) <= _MOST


def _is_row(thing: Any) -> bool:
    return type(thing) in (list, tuple)


def _kind(thing: Any) -> type | None:
    """int or float; None for what is no number."""
    if type(thing) in (float, torch.SymFloat):
        return float
    return int if type(thing) in (int, torch.SymInt) else None


class ScalarsChanged(Exception):
    """A step has changed numbers that were constants of its trace. `sentence` says so to the user."""

    def __init__(self, places: Sequence[ScalarLocation], sentence: str = "") -> None:
        super().__init__()
        self.places, self.sentence = places, sentence


@dataclass(slots=True)
class Counter:
    """One number, in all its places."""

    name: str
    places: list[ScalarLocation]
    number: Any
    """What it was when the step was captured."""
    box: torch.Tensor
    """0-d, int64 or float64, on the CPU: what the graph reads and writes."""
    symbol: Any = None
    """Stands for it while the step is traced."""

    def load(self) -> str | None:
        """Before a call: the box takes the number over. Says why not if that is no such number any more."""
        number = self.places[0].read()
        if type(number) is not type(self.number):
            return f"{self.places[0].path} was a {type(self.number).__name__}, is {_spell(number)}"
        for place in self.places[1:]:
            if not same(place.read(), number):
                return f"{place.path} was as large as {self.places[0].path}, is another number"
        if self.box.item() != number:
            self.box.fill_(number)
        return None

    def store(self) -> None:
        """Behind a call: the number is what is in the box."""
        number = self.box.item()
        for place in self.places:
            if not same(place.read(), number):
                place.write(number)

    def final_value(self) -> Any:
        """In the trace: the number that the step has left in all places.

        Raises:
            ScalarsChanged: numbers that were equal differ now, or an int is a float.
            CaptureError: something is no number any more.
        """
        found = [place.read() for place in self.places]
        for place, now in zip(self.places, found, strict=True):
            kind = _kind(now)
            if kind is None:
                raise CaptureError(f"{place.path} was a number before the step, and is {_spell(now)} after it.")
            if kind is float and place.kind is int:
                raise ScalarsChanged([replace(place, kind=float)])
        if len({expression_key(one) for one in found}) > 1:
            raise ScalarsChanged([replace(place, shared="") for place in self.places])
        return found[0]


class Counters:
    """All numbers that one step moves."""

    def __init__(self, places: Iterable[ScalarLocation]) -> None:
        """`places`: once each."""
        self.places = list(places)
        self._keys: dict[int, set[Any]] = {}
        self._saved: list[tuple[ScalarLocation, Any]] = []
        self.counters: list[Counter] = []
        known: dict[Hashable, Counter] = {}
        for place in self.places:
            self._keys.setdefault(identity(place.container), set()).add(place.key)
            number = place.read()
            key = (place.shared, place.kind, type(number), number) if place.shared else place.identity
            if key in known:
                known[key].places.append(place)
                continue
            known[key] = Counter(
                place.path, [place], number, torch.tensor(number, dtype=_DTYPES[place.kind], device="cpu")
            )
            self.counters.append(known[key])

    def written(self, given: Any) -> list[Counter]:
        """Those that the step moves itself: all that do not lie in `given`, the numbers among the arguments."""
        return [counter for counter in self.counters if counter.places[0].container is not given]

    def has(self, container: Any, key: Any) -> bool:
        """Whether numbers under a key move."""
        return key in self._keys.get(identity(container), ())

    def mark(self, snapshots: Iterable[Snapshot]) -> None:
        """Tells watches which numbers move."""
        for watch in snapshots if self._keys else ():
            watch.varying_keys = frozenset(self._keys.get(identity(watch.container), ()))

    def any_in(self, container: Any) -> bool:
        """Whether any number in a container moves."""
        return identity(container) in self._keys

    def install(self) -> None:
        """Puts symbols in the place of the numbers. Called inside the trace, where boxes are traced."""
        self._saved = [(place, place.held()) for counter in self.counters for place in counter.places]
        for counter in self.counters:
            counter.symbol = counter.box.item()
            for place in counter.places:
                place.write(counter.symbol)

    def close(self) -> None:
        """Writes what the step has left to the boxes, in the graph. Raises as `Counter.final_value` does."""
        for counter in self.counters:
            if (number := counter.final_value()) is not counter.symbol:
                with torch.no_grad():
                    counter.box.fill_(number)

    def restore(self) -> None:
        """Puts back what was there."""
        for place, held in self._saved:
            write_at(place.container, place.key, held)
        self._saved = []

    def why_not(self) -> str | None:
        """Before a call: all boxes take their numbers over. Says what is no such number any more."""
        return next(filter(None, (counter.load() for counter in self.counters)), None)


def _spell(thing: Any) -> str:
    return "not there" if thing is _MISSING else f"a {type(thing).__name__}"
