"""Counts of the calls of one compiled step."""

from __future__ import annotations

from dataclasses import dataclass, field

from wholestep.capture.guards.fast_guards import FastCall


@dataclass(slots=True)
class CallStats:
    """How often a step was called and captured. Native fast calls count themselves."""

    dispatched_calls: int = 0
    """Calls that did not go the native way."""
    dispatched_hits: int = 0
    """Dispatched calls for which an entry was there."""
    traces: int = 0
    """Entries that were captured."""
    loaded: int = 0
    """Entries that were loaded from a file."""
    resumed_calls: int = 0
    """Calls before this process, which a checkpoint has told; less than none if it was an earlier one."""
    fast_calls: list[FastCall] = field(default_factory=list)

    @property
    def fast_hits(self) -> int:
        """Calls that went the native way."""
        return sum(fast_call.hits for fast_call in self.fast_calls)

    @property
    def calls(self) -> int:
        """All calls, one that runs now among them."""
        return self.resumed_calls + self.dispatched_calls + self.fast_hits

    @property
    def hits(self) -> int:
        """All calls for which an entry was there."""
        return self.dispatched_hits + self.fast_hits
