"""Parameters that a run freezes and thaws: recorded calls run with the flags that they were made with.

``requires_grad`` is set at once, since Python may look at it, and is a record besides. So what is recorded runs while
parameters have the flags that they had before its first record, and sets them again as Python did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from wholestep.live.recording.record import StateKind


class FlagChanges:
    """What one run has set of ``requires_grad``."""

    def __init__(self) -> None:
        self._changes: list[tuple[int, torch.Tensor, bool]] = []
        """The number of the record, the parameter, and what it had before."""
        self._first: dict[int, bool] = {}
        """By id, what each of these parameters had when the run began: asked for every operand."""

    def set(self, number: int, param: torch.Tensor, act: Callable[[], object]) -> None:
        """Runs what the record with this number does, which sets what a parameter has."""
        before = param.requires_grad
        act()
        self.note(number, param, before)

    def note(self, number: int, param: torch.Tensor, before: bool) -> None:
        """The record with this number has set what a parameter has."""
        if param.requires_grad is not before:
            self._changes.append((number, param, before))
            self._first.setdefault(id(param), before)

    def kind_at_first(self, tensor: torch.Tensor) -> StateKind:
        """What a tensor was when the run began, as far as it is known of the state."""
        kind = StateKind.of(tensor)
        first = self._first.get(id(tensor), kind.requires_grad)
        return kind if first is kind.requires_grad else kind._replace(requires_grad=first)

    @contextmanager
    def before(self, number: int) -> Iterator[None]:
        """While open, parameters have what they had before the record with this number; then what they have now."""
        now = {id(param): (param, param.requires_grad) for _, param, _ in self._changes}
        for place, param, then in reversed(self._changes):
            if place >= number:
                param.requires_grad = then
        try:
            yield
        finally:
            for param, flag in now.values():
                param.requires_grad = flag
