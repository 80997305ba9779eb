"""What a step leaves with its optimizers: in the state of parameters, in groups, in attributes of their own.

- New tensors, and numbers that are computed from rates and counters, are results of the graph.
- A tensor in the place of one of the state is written to that one.
- A number that was another one before is a counter (`capture/scalars/counters.py`).
- What else changes (``state["started"] = True``) depends on nothing but what was looked at before the call, so whoever
  has looked again may write the same again: a *note*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymFloat, SymInt, Tensor

from wholestep.capture.python import tree_util
from wholestep.capture.python.snapshot import ABSENT, SCALARS, same
from wholestep.capture.reach.step_context import StepContext
from wholestep.capture.reach.train_state import Address, states
from wholestep.capture.scalars.counters import ScalarLocation, scalar_locations
from wholestep.capture.scalars.hyperparameters import torch_group_keys
from wholestep.errors import CaptureError


@dataclass(frozen=True, slots=True)
class StateWrite:
    """One plain value that a step leaves with an optimizer."""

    address: Address
    value: Any


@dataclass(frozen=True, slots=True)
class _Change:
    address: Address
    container: dict[Any, Any]
    then: Any
    now: Any


class OptimizerEffects:
    """Looks at the optimizers of a scene before a step runs, in the trace at its end, and behind the trace."""

    def __init__(self, context: StepContext) -> None:
        self._state, self._counters = context.state, context.counters
        self._read = {id(watch.container): watch.lifted for watch in context.lifter.snapshots}
        self._before = {id(held): (held, dict(held)) for _, held in self._holders()}
        self._groups = [
            (opt, list(opt.param_groups), [list(group["params"]) for group in opt.param_groups])
            for _, opt in context.state.optimizers
        ]
        self._attributes = {id(vars(opt)) for _, opt in context.state.optimizers}
        self.places: list[ScalarLocation] = []
        self.notes: list[StateWrite] = []

    def _holders(self) -> Iterator[tuple[Address, dict[Any, Any]]]:
        """Every dict of an optimizer, with an address in it."""
        for n, (_, opt) in enumerate(self._state.optimizers):
            yield Address(n, None, slot=-1), opt.state
            for param, held in states(opt):
                if id(param) in self._state.index:  # else it has come into a group in this trace, which is refused
                    yield Address(n, None, slot=self._state.index[id(param)]), held
            for g, group in enumerate(opt.param_groups):
                yield Address(n, None, group=g), group
            yield Address(n, None), vars(opt)

    def _changes(self) -> Iterator[_Change]:
        """What is another thing than before, but for what the graph reads as a number."""
        for where, held in self._holders():
            before = self._before[id(held)][1] if id(held) in self._before else {}
            own: Collection[Any] = torch_group_keys() if id(held) in self._attributes else ()
            skipped = {*own, *self._read.get(id(held), ()), *(("params",) if where.group is not None else ())}
            for key in {**before, **held}:
                then, now = before.get(key, ABSENT), held.get(key, ABSENT)
                if key in skipped or self._counters.has(held, key):
                    continue
                if where.slot == -1 and isinstance(key, Tensor) and isinstance(now, dict):
                    continue  # looked at by itself
                if not same(then, now):
                    yield _Change(Address(where.optimizer, key, where.group, where.slot), held, then, now)

    def write_replaced(self) -> None:
        """In the trace: gives tensors of the state the values of what the step has put in their places.

        Raises CaptureError for one that optimizers hold under several keys, which would have those values, too.
        """
        found = [one for one in self._changes() if self._state.takes(one.then, one.now)]
        befores = (before for _, before in self._before.values()) if found else ()
        held = Counter(id(one) for before in befores for one in before.values())
        for one in found:
            if held[id(one.then)] > 1:
                raise CaptureError(
                    f"The step puts another tensor in the place of {one.address.spelled(self._state)}, which its "
                    f"optimizer holds under {held[id(one.then)]} keys. Give each a tensor of its own where it is made."
                )
        self._state.write([(one.then, one.now) for one in found])
        for one in found:
            one.container[one.address.key] = one.then

    def created(self) -> list[tuple[Address, bool, Tensor]]:
        """In the trace: new tensors, and numbers of the graph (True) as tensors of no dimensions.

        Raises CaptureError for tensors that lie in containers of their own.
        """
        made: list[tuple[Address, bool, Tensor]] = []
        for one in self._changes():
            leaves = [leaf for _, leaf in tree_util.leaves_with_keys(one.now) if self._is_new(leaf)]
            if leaves and leaves[0] is not one.now:
                name = self._state.optimizers[one.address.optimizer][0]
                raise CaptureError(f"{name} creates state {one.address.key!r} in a form that cannot be put back.")
            if leaves:
                made.append((one.address, False, one.now))
            elif isinstance(one.now, (SymInt, SymFloat)) and type(one.then) not in (int, float):
                dtype = torch.int64 if isinstance(one.now, SymInt) else torch.float64
                made.append((one.address, True, torch.full((), one.now, dtype=dtype, device="cpu")))  # type: ignore[call-overload]
        return made

    def _is_new(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and id(leaf) not in self._state.index

    def put_back(self) -> list[str]:
        """Behind the trace: puts everything back. Says what would be frozen in the graph."""
        problems = [problem for groups in self._groups if (problem := self._put_back_groups(*groups))]
        for one in list(self._changes()):
            path, now = one.address.spelled(self._state), one.now
            shared = f"{one.address.optimizer}.{one.address.key}" if one.address.slot is not None else ""
            if places := scalar_locations(one.container, one.address.key, path, (one.then, now), shared):
                self.places += places
            elif _is_plain(now):
                self.notes.append(StateWrite(one.address, now))
            elif not isinstance(now, (Tensor, SymInt, SymFloat)) or isinstance(one.then, Tensor):
                problems.append(_problem(path, one.then, now))
        for held, before in self._before.values():
            kept = torch_group_keys() if id(held) in self._attributes else ()
            for key in [key for key in held if key not in before and key not in kept]:
                del held[key]
            held.update({key: one for key, one in before.items() if key not in kept})
        return problems

    def _put_back_groups(self, opt: Any, groups: list[Any], params: list[list[Tensor]]) -> str:
        """Puts back which groups an optimizer has, and whose parameters. Says what was different; "" if nothing was."""
        found = [*map(id, opt.param_groups), *(id(one) for group in opt.param_groups for one in group["params"])]
        if found == [*map(id, groups), *(id(one) for held in params for one in held)]:
            return ""
        opt.param_groups[:] = groups
        for group, held in zip(groups, params, strict=True):
            group["params"][:] = held
        return f"The step changes which parameters {type(opt).__name__} updates. Do that outside of the step."


def _is_plain(thing: Any) -> bool:
    return isinstance(thing, SCALARS) or (isinstance(thing, tuple) and all(map(_is_plain, thing)))


def _problem(path: str, then: Any, now: Any) -> str:
    was = "a tensor" if isinstance(then, Tensor) else repr(then)
    return (
        f"The step leaves {'nothing' if now is ABSENT else f'a {type(now).__name__}'} in {path}, which was {was}. "
        f"It would be frozen in the graph: keep numbers and tensors there, under the same keys."
    )
