"""Why a step is captured again, how often it may be, and what the next trace takes for an input.

[Note: numbers among the arguments]
``step(x, y, beta)``, ``step(batch, number)``. The first call takes such numbers for constants: most are the same for
ever, and code may do with a constant what it likes. One that is another number in a later call is an input of the graph
from then on (`capture/counters.py`), and what Python asks of it is asked again at every call (`capture/host.py`). Where
that cannot be, since a shape or an index of a list depends on it, each of its numbers is a trace of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

from wholestep.capture.blame import place_of
from wholestep.capture.guards import Guards
from wholestep.capture.ties import Captured
from wholestep.errors import CaptureError, RetraceLimitError

log = logging.getLogger("wholestep")

Key = int | str
"""The position of an argument, or its name."""


class Retraces:
    """The traces of one step behind its first."""

    def __init__(self, step: Callable[..., Any], limit: int) -> None:
        """`limit`: how many there may be."""
        self._step, self._limit = step, limit
        self.reasons: list[str] = []
        """A sentence for each."""
        self._moving: set[Key] = set()
        """Arguments whose numbers are inputs."""
        self._constant: dict[Key, str] = {}
        """Those whose numbers change and can be none, and why."""

    def allow(self, reason: str | None) -> None:
        """Counts one more, or none without a reason. Raises RetraceLimitError if there were enough."""
        if reason is None:
            return
        if len(self.reasons) >= self._limit:
            listing = "\n".join(f"  {number}. {text}" for number, text in enumerate([*self.reasons, reason], 1))
            constant = "".join(f"\nArgument {key!r} can be no input: {why}" for key, why in self._constant.items())
            raise RetraceLimitError(
                f"{place_of(self._step)} needs another trace, and max_retraces={self._limit} are used "
                f"up. The reasons were:\n{listing}\n"
                f"Keep what changes out of the step or make it a tensor, or raise max_retraces.{constant}"
            )
        self.reasons.append(reason)
        log.warning("%s is captured again: %s", getattr(self._step, "__name__", type(self._step).__name__), reason)

    def compared(self, guards: Guards, leaves: list[Any]) -> None:
        """Takes up arguments whose numbers are others in a call with these leaves, for which a trace does not hold."""
        self._moving |= guards.other_numbers(leaves) - self._constant.keys()

    def captured(self, capture: Callable[[Collection[Key]], Captured]) -> Captured:
        """What `capture` gives with all inputs that can be some. Raises what it raises without any."""
        if not self._moving:
            return capture(())
        try:
            return capture(self._moving)
        except CaptureError:
            changing, self._moving = sorted(self._moving, key=str), set()
        found = capture(())
        for key in changing:
            try:
                found = capture({*self._moving, key})
                self._moving.add(key)
            except CaptureError as error:
                self._constant[key] = str(error)
                log.info("argument %r can be no input: %s", key, error)
        return found
