"""What a live step can reach, found again only where more than plain values has changed.

[Note: a cached walk]
A walk through all that a step can reach takes 10 ms for a model of 150 parameters. Steps are live since their Python
changes something: a list of losses, a counter, a mean. Numbers and text lead to no module and to no parameter. So what
the last walk has found is kept, with what each container held, and native guards name those that were written to since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import nn

from wholestep.capture.guards.fast_guards import PARAMETER, TENSORS, StateGuard, guardable, state_guard
from wholestep.capture.guards.state_guards import hooks_of
from wholestep.capture.python import tree_util
from wholestep.capture.python.container_views import own_dict
from wholestep.capture.python.snapshot import SCALARS, Snapshot
from wholestep.capture.reach.reachability import find_reachable
from wholestep.capture.reach.reachable import Reachable
from wholestep.capture.reach.train_state import TrainState, collect, is_loose_parameter
from wholestep.capture.wrappers.fully_shard_settings import sharded_modules

_LONGEST_PAUSE = 64
"""Calls in a row at most whose walks are not kept, where the ones before did not hold."""


@dataclass(frozen=True, slots=True)
class Reached:
    """What a step can reach."""

    found: Reachable
    state: TrainState
    roots: list[nn.Module]
    sharded: list[Any]
    """Modules whose parameters are cut over the ranks."""


class CachedWalk:
    """The walks of one step."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self._step = step
        self._kept: _Kept | None = None
        self._misses = self._pause = 0
        self.walks = 0
        """How many there were."""

    def reached(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reached:
        """What a call ``step(*args, **kwargs)`` can reach."""
        if self._kept is not None and self._kept.holds(args, kwargs):
            self._misses = 0
            return self._kept.reached
        if self._kept is not None:  # it keeps alive what the user has dropped: where it does not hold, do so less often
            self._misses += 1
            self._pause = min(2**self._misses, _LONGEST_PAUSE)
        self.walks += 1
        found = find_reachable(self._step, args, kwargs)
        roots = [root for _, root in found.modules.values()]
        reached = Reached(found, collect(found), roots, sharded_modules(roots))
        self._pause = max(self._pause - 1, 0)
        self._kept = None if self._pause else _Kept(reached, args, kwargs)
        return reached


class _Kept:
    """What a walk has found, and what all containers held then."""

    def __init__(self, reached: Reached, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.reached = reached
        self._roots, self._spec = _shape_of(args, kwargs)
        self._params = [slot.tensor for slot in reached.state.params]
        self._hooks = [hooks_of(param) for param in self._params]
        self._loose = [(one, is_loose_parameter(one)) for _, one in reached.found.tensors.values()]
        named = [(snapshot, guardable(snapshot)) for snapshot in _containers(reached.found)]
        self._named = [snapshot for snapshot, pair in named if pair is not None]
        self._others = [snapshot for snapshot, pair in named if pair is None]
        pairs = [pair for _, pair in named if pair is not None]
        self._guard: StateGuard | None = state_guard(self._params, [PARAMETER] * len(self._params), pairs)

    def holds(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether another walk would find the same."""
        roots, spec = _shape_of(args, kwargs)
        if spec != self._spec or len(roots) != len(self._roots) or not all(map(is_, roots, self._roots)):
            return False
        if any(is_loose_parameter(one) != was for one, was in self._loose):
            return False
        changed = self._guard.changed() if self._guard is not None else (TENSORS, *range(len(self._named)))
        if TENSORS in changed and any(
            len(now := hooks_of(param)) != len(then) or not all(map(is_, now, then))
            for param, then in zip(self._params, self._hooks, strict=True)
        ):
            return False
        touched = [*(self._named[number] for number in changed if number >= 0), *self._others]
        if not all(map(_only_plain_values_changed, touched)):
            return False
        if self._guard is not None:
            self._guard.accept()
        return True


def _only_plain_values_changed(snapshot: Snapshot) -> bool:
    """Whether what a container holds leads where it did. If so it is what is compared with from now on."""
    then, now = snapshot.held, snapshot.now()
    if isinstance(now, list):
        differ = ((a, b) for a, b in zip_longest(then, now) if a is not b)
    else:
        pairs = ((then.get(key), now.get(key)) for key in {**then, **now})
        differ = ((a, b) for a, b in pairs if a is not b)
    if not all(_leads_nowhere(a) and _leads_nowhere(b) for a, b in differ):
        return False
    snapshot.held = now
    return True


def _leads_nowhere(item: Any) -> bool:
    return isinstance(item, (*SCALARS, np.generic)) and own_dict(item) is None


def _shape_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], tree_util.TreeSpec]:
    """What a walk begins at besides the step itself, and how the arguments are nested."""
    leaves, spec = tree_util.flatten((args, kwargs))
    return [leaf for leaf in leaves if not isinstance(leaf, (torch.Tensor, *SCALARS))], spec


def _containers(found: Reachable) -> Iterator[Snapshot]:
    """All that the walk has gone through, but what moves with each step of a scheduler."""
    moving = {id(vars(scheduler)) for _, scheduler in found.schedulers}
    yield from (one for one in found.snapshots if id(one.container) not in moving)
    held: list[Any] = []
    for _, scheduler in found.schedulers:
        yield _as_it_is(vars(scheduler), ("optimizer", "_schedulers"))
    for _, opt in found.optimizers.values():
        held += [vars(opt), opt._optimizer_step_pre_hooks, opt._optimizer_step_post_hooks, opt.param_groups]
        held += [part for group in opt.param_groups for part in (group, group["params"])]
    yield from map(_as_it_is, held)


def _as_it_is(container: Any, keys: tuple[str, ...] | None = None) -> Snapshot:
    snapshot = Snapshot(container, "", keys)
    snapshot.held = snapshot.now()
    return snapshot
