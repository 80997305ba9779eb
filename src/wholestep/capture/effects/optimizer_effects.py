"""What a step leaves with its optimizers: in the state of parameters, in groups, in attributes of their own.

- New tensors are results of the graph.
- A tensor in the place of one of the state is written to that one.
- Anything else (``group["step"] += 1``, ``state["started"] = True``) is Python, which no graph repeats: refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from wholestep.capture.python import tree_util
from wholestep.capture.python.code_lines import writer_of
from wholestep.capture.python.snapshot import ABSENT, same
from wholestep.capture.reach.step_context import StepContext
from wholestep.capture.reach.train_state import Address, states
from wholestep.capture.scalars.hyperparameters import torch_group_keys
from wholestep.errors import CaptureError


@dataclass(frozen=True, slots=True)
class _Change:
    address: Address
    container: dict[Any, Any]
    then: Any
    now: Any


@dataclass(frozen=True, slots=True)
class _Held:
    """An optimizer, the containers in which it keeps its state and its groups, and what is in the groups."""

    optimizer: Optimizer
    state: dict[Any, Any]
    param_groups: list[Any]
    groups: tuple[dict[str, Any], ...]
    params: tuple[tuple[Tensor, ...], ...]

    @classmethod
    def of(cls, opt: Optimizer) -> _Held:
        groups = tuple(opt.param_groups)
        return cls(opt, opt.state, opt.param_groups, groups, tuple(tuple(one["params"]) for one in groups))

    def put_back(self) -> str:
        """Puts all of it back. Says what was different; "" if nothing was."""
        opt, name = self.optimizer, type(self.optimizer).__name__
        moved = [[*map(id, group["params"])] for group in opt.param_groups] != [[*map(id, one)] for one in self.params]
        holders = [opt.state, opt.param_groups, *opt.param_groups]
        replaced = [*map(id, holders)] != [*map(id, (self.state, self.param_groups, *self.groups))]
        opt.state, opt.param_groups = self.state, self.param_groups  # type: ignore[assignment]
        self.param_groups[:] = self.groups
        for group, params in zip(self.groups, self.params, strict=True):
            group["params"][:] = params
        if moved:
            return f"The step changes which parameters {name} updates. Do that outside of the step."
        if replaced:
            return f"The step gives {name} other containers for its state (load_state_dict). Do it outside of the step."
        return ""


class OptimizerEffects:
    """Looks at the optimizers of a scene before a step runs, in the trace at its end, and after the trace."""

    def __init__(self, context: StepContext) -> None:
        self._state, self._codes = context.state, context.reachable.codes
        self._read = {id(watch.container): watch.lifted for watch in context.lifter.snapshots}
        self._before = {id(held): (held, dict(held)) for _, held in self._holders()}
        self._held = [_Held.of(opt) for _, opt in context.state.optimizers]
        self._attributes = {id(vars(opt)) for _, opt in context.state.optimizers}

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
                if key in skipped or (where.slot == -1 and isinstance(key, Tensor) and isinstance(now, dict)):
                    continue  # the state of a parameter is looked at by itself
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

    def created(self) -> list[tuple[Address, Tensor]]:
        """In the trace: new tensors. Raises CaptureError for those that lie in containers of their own."""
        made: list[tuple[Address, Tensor]] = []
        for one in self._changes():
            leaves = [leaf for _, leaf in tree_util.leaves_with_keys(one.now) if self._is_new(leaf)]
            if leaves and leaves[0] is not one.now:
                name = self._state.optimizers[one.address.optimizer][0]
                raise CaptureError(f"{name} creates state {one.address.key!r} in a form that cannot be put back.")
            if leaves:
                made.append((one.address, one.now))
        return made

    def _is_new(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and id(leaf) not in self._state.index

    def put_back(self) -> list[str]:
        """After the trace: puts everything back. Says what no graph would do again."""
        problems = [problem for held in self._held if (problem := held.put_back())]
        for one in list(self._changes()):
            if not isinstance(one.now, Tensor) or isinstance(one.then, Tensor):
                problems.append(self._problem(one))
        for held, before in self._before.values():
            kept = torch_group_keys() if id(held) in self._attributes else ()
            for key in [key for key in held if key not in before and key not in kept]:
                del held[key]
            held.update({key: one for key, one in before.items() if key not in kept})
        return problems

    def _problem(self, change: _Change) -> str:
        path = change.address.spelled(self._state)
        was = "a tensor" if isinstance(change.then, Tensor) else repr(change.then)
        left = "nothing" if change.now is ABSENT else f"a {type(change.now).__name__}"
        line = writer_of(str(change.address.key), self._codes)
        return (
            f"The step leaves {left} in {path}{f' at {line}' if line else ''}, which was {was}. A graph keeps tensors "
            f"of optimizers and nothing else: keep it in a tensor that the step writes to."
        )
