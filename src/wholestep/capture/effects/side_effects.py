"""Python side effects of a step: seen while tracing, undone, and named, since a graph would not repeat them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wholestep.capture.effects.object_effects import recordable_locations
from wholestep.capture.effects.optimizer_effects import OptimizerEffects
from wholestep.capture.python.code_lines import writer_of
from wholestep.capture.python.snapshot import Location, Snapshot
from wholestep.capture.reach.grad_scaler import ScalerState as ScalerNotes
from wholestep.capture.reach.rng_and_iterators import Generators
from wholestep.capture.reach.step_context import StepContext
from wholestep.capture.scalars.counters import ScalarLocation, scalar_locations
from wholestep.errors import CaptureError, HyperparameterError

TICKS = "_step_count"
"""The attribute in which schedulers count calls for their warnings."""
_HARMLESS = ("._opt_called", f".{TICKS}")
"""What optimizers and schedulers count for their own warnings."""


class SideEffects:
    """Around one trace. Optimizer state is put back, since the graph returns it.

    After a failed trace everything is put back. After a successful one `changed` holds what is different; the
    caller decides whether to `restore`. Random generators are always put back, and draws that no graph has are refused.
    """

    def __init__(self, context: StepContext, optimizers: OptimizerEffects) -> None:
        found, state = context.reachable, context.state
        self._found, self._known = found, state.index.keys()
        self._of_tensors = {id(vars(slot.tensor)) for slot in state.slots}
        self._of_modules = {
            id(held)
            for _, top in found.modules.values()
            for one in top.modules()
            for held in (one._parameters, one._buffers, one._modules)
        }
        self._generators, self._scalers = Generators(found.generators), ScalerNotes(found.scalers)
        self._optimizers = optimizers
        self._cached = [one.cache_info().currsize for _, one in found.caches]
        self.changed: list[tuple[str, Any, Any]] = []
        """(path, then, now)."""
        self._watches: list[Snapshot] = []
        self._counts = [vars(scheduler).get(TICKS) for _, scheduler in found.schedulers]
        self.ticks: dict[int, int] = {}
        """Calls that schedulers counted for their warnings, by their numbers."""

    def __enter__(self) -> SideEffects:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        problems = self._optimizers.put_back()
        for watch in self._found.snapshots:
            changes = [change for change in watch.changes() if not change[0].endswith(_HARMLESS)]
            if changes:
                self.changed += changes
                self._watches.append(watch)
        for number, ((_, scheduler), then) in enumerate(zip(self._found.schedulers, self._counts, strict=True)):
            if (now := vars(scheduler).get(TICKS)) != then:
                self.ticks[number] = now - then
                setattr(scheduler, TICKS, then)
        drew, noted = self._generators.restore(), self._scalers.restore()
        problem = drew or noted or self._emptied_caches()
        if kind is not None or problems or problem or any(map(self._is_new_tensor, self.changed)):
            self.restore()
        if kind is not None:
            return
        if problems:
            raise HyperparameterError(problems[0])
        if problem:
            raise CaptureError(problem)
        if any(map(self._is_new_tensor, self.changed)):
            raise CaptureError(self.sentence())

    def _emptied_caches(self) -> str:
        """Has functions forget what they have given in a trace, which may be made of its tensors. Says which did."""
        problem = ""
        for (name, function), size in zip(self._found.caches, self._cached, strict=True):
            if function.cache_info().currsize != size:
                function.cache_clear()
                problem = (
                    f"The step calls {name}, which keeps what it gives (functools.lru_cache), for the first time with "
                    f"these arguments. It would keep what it gave while capturing: call it once before the step."
                )
        return problem

    def _is_new_tensor(self, change: tuple[str, Any, Any]) -> bool:
        """Whether a tensor of the trace was left behind. One of the state may stand elsewhere (a sharded weight)."""
        return isinstance(change[2], Tensor) and id(change[2]) not in self._known

    def changed_scalars(self) -> list[ScalarLocation]:
        """Places of what the step changed, if all of that is numbers; else none."""
        found = []
        for watch in self._watches:
            for key, path, then, now in watch.changed_items():
                if path.endswith(_HARMLESS):
                    continue
                # A tensor is another object while the step is traced, and has other attributes.
                cannot = key is None or id(watch.container) in self._of_tensors
                places = [] if cannot else scalar_locations(watch.container, key, path, (then, now))
                if not places:
                    return []
                found += places
        return found

    def kept_objects(self) -> list[Location]:
        """Where the step leaves things that are results, if all of what it changed is such things and numbers."""
        found = []
        for watch in self._watches:
            for key, path, then, now in watch.changed_items():
                if path.endswith(_HARMLESS):
                    continue
                cannot = id(watch.container) in self._of_tensors or id(watch.container) in self._of_modules
                ways = [] if cannot else recordable_locations(watch, key, path, (then, now))
                if not ways:
                    return []
                found += [one for one in ways if not isinstance(one, ScalarLocation)]
        return found

    def restore(self) -> None:
        """Puts back what the step changed."""
        for watch in self._watches:
            watch.restore()

    def sentence(self) -> str:
        """What the step changed first, and what to do instead."""
        path, then, now = next((c for c in self.changed if self._is_new_tensor(c)), self.changed[0])
        hint = "Do it outside the step, or keep it in a tensor."
        if path.endswith((".last_epoch", "._last_lr")):
            hint = "Call scheduler.step() outside the step; rates are read at every call."
        elif isinstance(now, Tensor):
            hint = "Return the tensor instead."
        was, is_ = ("a tensor" if isinstance(one, Tensor) else repr(one) for one in (then, now))
        line = writer_of(path, self._found.codes)
        where = f" at {line}" if line else ""
        return (
            f"The step changes Python state{where}: {path} was {was}, is {is_} after one run. That would happen once, "
            f"while capturing, and never again. {hint}"
        )
