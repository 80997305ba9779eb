"""Python numbers that are others in later calls: ``model.temperature = ...``, ``step(x, y, beta)``.

[Note: numbers that vary]
A number that the user's loop moves becomes an input of the graph (`capture/retrace_policy.py`): a trace runs with a
symbol in its place. The symbol is read of a *box*, a 0-d tensor on the CPU that is state of the step like the ``step``
of torch's Adam. The box takes the number over before each call. A step that writes to such a place itself is refused.

Numbers among the arguments stand in a dict of the scene, from which the arguments of the trace are taken.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from wholestep.capture.python.container_views import CellView, ClassView, ContentView, SlotsView
from wholestep.capture.python.snapshot import Snapshot
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
    """int or float."""

    @property
    def identity(self) -> Hashable:
        """The same for the same place, however it was reached."""
        return identity(self.container), self.key

    def read(self) -> Any:
        """What is there now."""
        try:
            return self.container[self.key]
        except (KeyError, IndexError, AttributeError, ValueError):
            return _MISSING


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


def scalar_location(container: Any, key: Any, path: str, pair: tuple[Any, Any]) -> ScalarLocation | None:
    """The place of a number that has changed; None for what is no number, or can be no input. `pair`: then and now."""
    if isinstance(container, (ClassView, ContentView)) or not all(type(one) in _DTYPES for one in pair):
        return None
    return ScalarLocation(container, key, path, float if float in map(type, pair) else int)


def fits_a_box(number: Any) -> bool:
    """False for an int of more than 64 bits."""
    return type(number) is not int or abs(number) <= _MOST


@dataclass(slots=True)
class VaryingNumber:
    """One number."""

    place: ScalarLocation
    number: Any
    """What it was when the step was captured."""
    box: torch.Tensor
    """0-d, int64 or float64, on the CPU: what the graph reads."""
    symbol: Any = None
    """Stands for it while the step is traced."""

    def load(self) -> str | None:
        """Before a call: the box takes the number over. Says why not if that is no such number any more."""
        number = self.place.read()
        if type(number) is not type(self.number):
            now = "not there" if number is _MISSING else f"a {type(number).__name__}"
            return f"{self.place.path} was a {type(self.number).__name__}, is {now}"
        if self.box.item() != number:
            self.box.fill_(number)
        return None


class VaryingNumbers:
    """All numbers of one step that vary."""

    def __init__(self, places: Sequence[ScalarLocation]) -> None:
        """`places`: once each."""
        self.places = list(places)
        self._keys: dict[int, set[Any]] = {}
        self._saved: list[tuple[ScalarLocation, Any]] = []
        self.numbers: list[VaryingNumber] = []
        for place in self.places:
            self._keys.setdefault(identity(place.container), set()).add(place.key)
            number = place.read()
            box = torch.tensor(number, dtype=_DTYPES[place.kind], device="cpu")
            self.numbers.append(VaryingNumber(place, number, box))

    def has(self, container: Any, key: Any) -> bool:
        """Whether the number under a key varies."""
        return key in self._keys.get(identity(container), ())

    def mark(self, snapshots: Iterable[Snapshot]) -> None:
        """Tells watches which numbers vary."""
        for watch in snapshots if self._keys else ():
            watch.varying_keys = frozenset(self._keys.get(identity(watch.container), ()))

    def install(self) -> None:
        """Puts symbols in the place of the numbers. Called inside the trace, where boxes are traced."""
        self._saved = [(one.place, one.place.read()) for one in self.numbers]
        for one in self.numbers:
            one.symbol = one.box.item()
            write_at(one.place.container, one.place.key, one.symbol)

    def check(self) -> None:
        """In the trace, at its end. Raises CaptureError for a number that the step has written to."""
        for one in self.numbers:
            if one.place.read() is not one.symbol:
                raise CaptureError(
                    f"The step writes to {one.place.path}, a number that is another one in other calls, too. Do it "
                    f"outside of the step."
                )

    def restore(self) -> None:
        """Puts back what was there."""
        for place, held in self._saved:
            write_at(place.container, place.key, held)
        self._saved = []

    def why_not(self) -> str | None:
        """Before a call: all boxes take their numbers over. Says what is no such number any more."""
        return next(filter(None, (one.load() for one in self.numbers)), None)
