"""Guards: when a trace may be used again, and else the reason why not in one sentence.

[Note: cheap and complete]
Every call checks everything a trace depends on. Comparing thousands of values in Python costs more than many a small
step, so native guards (`capture/native`) come first. They may say "perhaps changed" too often, never "unchanged"
wrongly; what they name is compared in full, and where there are none everything is. They know:
- Python tells of each write to a dict (3.12 on), or one that was not written has the same version number; a list and a
  closure cell hold the very objects they held;
- the modes of torch;
- of each tensor type, dtype, device, shape, strides and ``requires_grad``, of a parameter its gradient and its hooks.
What lives in a tensor itself (``.data =``, ``resize_``, ``requires_grad_``, ``.grad =``) leaves no trace in any dict,
so every tensor of the state is looked at in every call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from wholestep.capture.guards.fast_guards import FastCall, FastPath, FastRun, fast_call
from wholestep.capture.python import tree_util
from wholestep.capture.python.snapshot import Snapshot
from wholestep.capture.python.tracing_thread import NO_OTHER_CAPTURE
from wholestep.capture.reach.arguments import ArgumentPath
from wholestep.capture.scalars.varying_numbers import VaryingValue


class Call(NamedTuple):
    """One call, as guards see it."""

    leaves: list[Any]
    changed: tuple[int, ...]
    """What of the state may have changed, as `StateGuard.changed` gives it."""
    spec: tree_util.TreeSpec | None = None
    """Structure of the arguments; None where it is known to be that of the trace."""


class Guard(ABC):
    """One thing that a trace depends on."""

    __slots__ = ()

    @abstractmethod
    def why_not(self, call: Call) -> str | None:
        """Why the trace does not hold for a call, in one sentence; None if this thing is as it was."""

    def varying_values(self, leaves: Mapping[ArgumentPath, Any]) -> Iterator[VaryingValue]:
        """Numbers, texts and sizes that were constants of the trace, and are others for a call with these leaves, which
        may have another structure."""
        yield from ()

    def exchanged_tensors(self) -> Iterator[tuple[Hashable, str, torch.Tensor]]:
        """Places with other tensors than in the trace, but of the same layout: an identity, how it is written, and the
        tensor that stands there."""
        yield from ()

    def changed_containers(self, changed: tuple[int, ...]) -> Iterator[Snapshot]:
        """Containers that hold something else than in the trace, of those in which `Call.changed` says so."""
        yield from ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Guards:
    """The guards of one trace. `why_not` is None exactly when the graph means the same for this call."""

    arguments: tuple[Guard, ...]
    state: tuple[Guard, ...]
    """Asked about what may have changed; at a call for which that is nothing only if `always`."""
    values: tuple[Guard, ...]
    """Asked at every call, since the native guards do not know of it."""
    fast: FastPath
    always: bool
    """Whether the state holds something that the native guards cannot vouch for."""

    def fast_call(self, run: FastRun) -> FastCall | None:
        """The quick way through a call: `run` where this trace holds. None where only `why_not` can tell."""
        if self.fast.signature is None or self.fast.state is None:
            return None
        always = self.always or bool(self.values)
        return fast_call(self.fast.signature, self.fast.state, self._state_why_not, always, run)

    def why_not(self, leaves: list[Any], spec: tree_util.TreeSpec) -> str | None:
        """Why this trace does not hold for a call with these arguments, in one sentence; None if it holds."""
        with NO_OTHER_CAPTURE:
            call = Call(leaves, self.fast.changed(), spec)
            return _first_reason(self.arguments, call) or self._state_why_not(leaves, call.changed)

    def state_why_not(self) -> str | None:
        """Why this trace does not hold with the state as it is now, whatever the arguments; None if it may."""
        return self._state_why_not([], self.fast.changed())

    def changed_containers(self) -> list[Snapshot]:
        """The containers that hold something else than in the trace."""
        changed = self.fast.changed()
        if not changed and not self.always:
            return []
        return [one for guard in self.state for one in guard.changed_containers(changed)]

    def _state_why_not(self, leaves: list[Any], changed: tuple[int, ...]) -> str | None:
        call = Call(leaves, changed)
        with NO_OTHER_CAPTURE:
            if changed or self.always:
                if (reason := _first_reason(self.state, call)) is not None:
                    return reason
                self.fast.accept()
            return _first_reason(self.values, call)

    def varying_values(self, leaves: Mapping[ArgumentPath, Any]) -> Iterator[VaryingValue]:
        """See `Guard.varying_values`."""
        for guard in (*self.arguments, *self.state, *self.values):
            yield from guard.varying_values(leaves)

    def exchanged_tensors(self) -> Iterator[tuple[Hashable, str, torch.Tensor]]:
        """See `Guard.exchanged_tensors`."""
        for guard in self.state:
            yield from guard.exchanged_tensors()


def _first_reason(guards: tuple[Guard, ...], call: Call) -> str | None:
    for guard in guards:
        if (reason := guard.why_not(call)) is not None:
            return reason
    return None
