"""Events: what a rank of a live step tells the others before it does something that all have to do alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

ENDS, RUNS_BACKWARD, RUNS_PIECE, PUTS_GRADIENTS, RUNS_FORWARD, RUNS_ON_SHARDS, GATHERS = range(7)
DOES = {
    ENDS: "ends its call",
    RUNS_BACKWARD: "runs a backward",
    RUNS_PIECE: "runs recorded calls",
    PUTS_GRADIENTS: "comes to a backward",
    RUNS_FORWARD: "runs a forward that gathers parameters",
    RUNS_ON_SHARDS: "runs an update or another call that all ranks have to make",
}
"""In words."""


@dataclass(frozen=True, slots=True)
class Event:
    """What a rank is about to do."""

    kind: int
    what: int = 0
    """A number that is the same on ranks that run the same piece, or gather the same tensor."""
    detail: int = field(default=0, compare=False)
    """Of a piece: the number of the plans with which it was compiled; 0 if it was not yet. Of the end of a call:
    whether this rank has news of its paths."""
    is_local: int = field(default=0, compare=False)
    """Whether it is a piece of calls that one rank may make alone."""


def communicates(function: Callable[..., Any]) -> bool:
    """Whether it is one of torch by which ranks send each other something."""
    return str(getattr(function, "__module__", "")).startswith(_COMMUNICATE)


_COMMUNICATE = ("torch.distributed", "torch._ops._c10d", "torch._ops.c10d")
"""How the names of their modules begin."""
