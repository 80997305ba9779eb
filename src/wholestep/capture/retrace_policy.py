"""RetracePolicy: why a step is captured again, how often, and which values become inputs.

[Note: numbers that move between calls]
``step(x, y, beta)``, ``step(batch, number)``, ``model.temperature = ...``. The first trace takes numbers for constants:
most are the same for ever, and code may do with a constant what it likes. One that is another number in a later call is
an input of the graph from then on (`capture/scalars/varying_numbers.py`). What Python asks of it is asked at every call
(`capture/scalars/host_scalars.py`). Where that cannot be, since a shape or an index of a list depends on it, each
of its numbers is a trace of its own.

[Note: sizes that move between calls]
A dim of an argument that has another size in a later call is a symbol from then on (`capture/sizes/size_symbols.py`).
One that an operator makes a constant all the same is named, and is a constant of all later traces.

[Note: text among the arguments]
Names of files that come with a batch. Text can be no input, but mostly nobody looks at it: then it may be any. A trace
in which it cannot be looked at says so (`capture/reach/arguments.py`), if it gives the program that the text itself
gives.

[Note: tensors that move between calls]
``trainer.batch = next(loader)``, or what another step puts there. Another tensor in a place means another trace, once.
A step for which it is another one again and again is refused, before it has used up its retraces.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any

import torch

from wholestep.capture.bind.captured import Captured
from wholestep.capture.equivalence import is_equivalent
from wholestep.capture.guards.guards import Guards
from wholestep.capture.python.user_frame import defined_at
from wholestep.capture.reach.arguments import ArgumentPath, ArgumentSize, Leaf
from wholestep.capture.scalars.varying_numbers import ScalarLocation, VaryingValue
from wholestep.errors import CaptureError, RetraceLimitError

log = logging.getLogger("wholestep")

MAX_TRIED = 32
"""Numbers that are tried one by one where not all can be inputs: a capture each. A batch of lists has thousands."""


class RetracePolicy:
    """The traces of one step after its first."""

    def __init__(self, step: Callable[..., Any], limit: int, dynamic: bool | None = None) -> None:
        """`limit`: how many there may be. `dynamic`: False keeps sizes of arguments constant."""
        self._step, self._limit, self._dynamic = step, limit, dynamic
        self.reasons: list[str] = []
        """A sentence for each."""
        self._varying: dict[Hashable, VaryingValue] = {}
        """Numbers that are inputs."""
        self._exchanged: dict[Hashable, weakref.ref[torch.Tensor]] = {}
        """Places in which another tensor stood in a later call, and the last such tensor."""
        self._exchanged_now: dict[Hashable, tuple[str, weakref.ref[torch.Tensor]]] = {}
        """Those of the call that is compared, with how they are written."""
        self._constant: dict[Hashable, str] = {}
        """Those that change and can be none, and why."""

    @property
    def constant_sizes(self) -> list[str]:
        """A sentence for each dim of an argument that moves and is a constant all the same."""
        return [why for key, why in self._constant.items() if isinstance(key, ArgumentSize)]

    def moving_sizes(self, marked: Collection[ArgumentSize]) -> list[ArgumentSize]:
        """The dims that are to be symbols in the next trace. `marked`: those which the user wants to be."""
        found = [*marked, *(one for one in self._varying.values() if isinstance(one, ArgumentSize))]
        return [one for one in dict.fromkeys(found) if one not in self._constant]

    def allow(self, reason: str | None) -> None:
        """Counts one more, or none without a reason. Raises RetraceLimitError if there were enough, and CaptureError
        where a tensor is another one again."""
        if reason is None:
            return
        for place, (path, tensor) in self._exchanged_now.items():
            if place in self._exchanged and self._exchanged[place]() is not tensor():
                raise CaptureError(
                    f"{path} is another tensor in every call. A graph is tied to the tensors that stand in objects: "
                    f"pass it as an argument of the step, or write to the one that stands there: copy_()."
                )
            self._exchanged[place] = tensor
        if len(self.reasons) >= self._limit:
            listing = "\n".join(f"  {number}. {text}" for number, text in enumerate([*self.reasons, reason], 1))
            constant = "".join(f"\n{why}" for why in self._constant.values())
            raise RetraceLimitError(
                f"{defined_at(self._step)} needs another trace, and max_retraces={self._limit} are used "
                f"up. The reasons were:\n{listing}\n"
                f"Pass batches as arguments, keep what else changes out of the step, or make it a tensor, pad batches "
                f"to a few sizes, or raise max_retraces.{constant}"
            )
        self.reasons.append(reason)
        log.warning("%s is captured again: %s", getattr(self._step, "__name__", type(self._step).__name__), reason)

    def compared(self, guards: Guards, leaves: Mapping[ArgumentPath, Any]) -> None:
        """Notes what is another number, text, size or tensor in a call with these leaves, for which a trace does not
        hold."""
        found = {_identity(one): one for one in guards.varying_values(leaves)}
        if self._dynamic is False:
            found = {key: one for key, one in found.items() if not isinstance(one, ArgumentSize)}
        self._varying |= {key: one for key, one in found.items() if key not in self._constant}
        self._exchanged_now = {place: (path, weakref.ref(one)) for place, path, one in guards.exchanged_tensors()}

    def captured(
        self, capture: Callable[[Collection[VaryingValue]], Captured], sizes: Collection[ArgumentSize] = ()
    ) -> Captured:
        """What `capture` gives with all inputs that can be some. Raises what it raises without any.

        `sizes`: of arguments, that are to be symbols although they have not moved yet.
        """
        self._varying |= {one: one for one in sizes if one not in self._constant}
        here: dict[Hashable, VaryingValue] = {}
        try:
            found = self._captured(capture)
            while found.constant_sizes:  # without them the trace is one of plain numbers
                found.undo()
                for size, why in found.constant_sizes.items():
                    self._varying.pop(size, None)
                    if why is None:
                        here[size] = size
                        continue
                    self._constant[size] = f"{_name(size)} is a constant: {why}"
                    log.warning("%s: %s.", getattr(self._step, "__name__", self._step), self._constant[size])
                found = self._captured(capture)
        finally:
            self._varying |= here  # sizes that are constants of this trace alone
        return found

    def _captured(self, capture: Callable[[Collection[VaryingValue]], Captured]) -> Captured:
        varying, constant = dict(self._varying), dict(self._constant)
        try:
            return _checked(capture, self._varying.values())
        except Exception as error:  # a symbol is no int: what the user's code asks of it may raise anything
            if not self._varying:
                raise
            first = error
        try:
            return self._with_those_that_can_be(capture, first)
        except Exception:  # the step raises it for this call, with symbols and without: it tells nothing of them
            self._varying, self._constant = varying, constant
            raise

    def _with_those_that_can_be(
        self, capture: Callable[[Collection[VaryingValue]], Captured], first: Exception
    ) -> Captured:
        """What `capture` gives with those inputs with which it gives something; `first` is what it raised with all."""
        groups = _groups(self._varying)
        if len(groups) > MAX_TRIED:
            raise CaptureError(
                f"{len(groups)} numbers are others in later calls, and not all of them can be inputs of a graph. Make "
                f"a tensor of them outside of the step, and pass that. What was tried: {first}"
            ) from first
        self._varying = {}
        for group in groups:
            try:
                if len(groups) == 1:
                    raise first
                _checked(capture, [*self._varying.values(), *group.values()]).undo()
                self._varying |= group
            except Exception as error:
                for key, one in group.items():
                    self._constant[key] = f"{_name(one)} can be no input of the graph: {error}"
                    log.log(logging.WARNING if isinstance(key, ArgumentSize) else logging.INFO, self._constant[key])
        return _checked(capture, self._varying.values())


def _checked(capture: Callable[[Collection[VaryingValue]], Captured], varying: Collection[VaryingValue]) -> Captured:
    """What `capture` gives. Raises CaptureError where that is another program than with the numbers and texts.

    Sizes are symbols in both: what is computed of them are calls of the graph.
    """
    sizes = [one for one in varying if isinstance(one, ArgumentSize)]
    if len(sizes) == len(varying):
        return capture(sizes)
    plain = capture(sizes)
    plain.undo()
    found = capture(varying)
    if not is_equivalent(plain, found):
        found.undo()
        raise CaptureError(
            "The step does something else where it is given an input in the place of the number or text."
        )
    return found


def _groups(changing: Mapping[Hashable, VaryingValue]) -> list[dict[Hashable, VaryingValue]]:
    """What is tried together: all sizes, all texts, of which a batch may have many, and each number by itself."""
    texts: dict[Hashable, VaryingValue] = {}
    sizes: dict[Hashable, VaryingValue] = {key: one for key, one in changing.items() if isinstance(one, ArgumentSize)}
    groups: list[dict[Hashable, VaryingValue]] = []
    for key, one in changing.items():
        if _is_text(one):
            texts[key] = one
        elif key not in sizes:
            groups.append({key: one})
    return [one for one in (sizes, *groups, texts) if one]


def _is_text(one: VaryingValue) -> bool:
    return isinstance(one, Leaf) and one.is_text


def _name(one: VaryingValue) -> str:
    name = one.path if isinstance(one, ScalarLocation) else str(one)
    return f"{name[0].upper()}{name[1:]}"


def _identity(one: VaryingValue) -> Hashable:
    return one.identity if isinstance(one, ScalarLocation) else one
