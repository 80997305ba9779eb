"""Python side effects of a step: seen while tracing, undone, and named, since a graph would not repeat them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from wholestep.capture.effects.optimizer_effects import OptimizerEffects
from wholestep.capture.python import tree_util
from wholestep.capture.python.code_lines import writer_of
from wholestep.capture.python.container_views import BUFFERS, ContentView
from wholestep.capture.python.snapshot import Snapshot
from wholestep.capture.reach.grad_scaler import ScalerState as ScalerNotes
from wholestep.capture.reach.rng_and_iterators import Generators
from wholestep.capture.reach.step_context import StepContext
from wholestep.errors import CaptureError, HyperparameterError

_HARMLESS = "._opt_called"
"""What optimizers note for the warnings of schedulers."""


_SIZES_KEPT = re.compile(r"_(sym_)?(sizes|strides)_capsule(_len)?")
"""Attributes in which torch itself keeps what it was told of a fake tensor's sizes."""


class SideEffects:
    """Around one trace. Optimizer state is put back, since the graph returns it.

    After a failed trace everything is put back. After a successful one `changed` holds what is different; the
    caller decides whether to `restore`. Random generators are always put back, and draws that no graph has are refused.
    """

    def __init__(self, context: StepContext, optimizers: OptimizerEffects) -> None:
        self._found, self._known = context.reachable, context.state.index.keys()
        self._generators, self._scalers = Generators(self._found.generators), ScalerNotes(self._found.scalers)
        self._optimizers = optimizers
        self._cached = [one.cache_info().currsize for _, one in self._found.caches]
        self._of_arguments = [(vars(one), dict(vars(one))) for one in context.user]
        self.changed: list[tuple[str, Any, Any]] = []
        """(path, then, now)."""
        self._watches: list[Snapshot] = []
        self._leaves_tensors = False
        """Whether tensors of the trace are among what is different. They mean nothing after it."""

    def __enter__(self) -> SideEffects:
        self._generators.watch()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        problems = self._optimizers.put_back()
        for watch in self._found.snapshots:
            changes = [change for change in watch.changes() if not change[0].endswith(_HARMLESS)]
            if watch.reordered():
                changes.append((watch.path, list(watch.held), list(watch.container)))
            if changes:
                self.changed += changes
                self._watches.append(watch)
                left = watch.now() if isinstance(watch.container, list) else [now for _, _, now in changes]
                self._leaves_tensors |= self._holds_new_tensor(left)
        drew, noted = self._generators.restore(), self._scalers.restore()
        problem = drew or noted or self._emptied_caches() or self._marked_arguments()
        if kind is not None or problems or problem or self._leaves_tensors:
            self.restore()
        if kind is not None:
            return
        if problems:
            raise HyperparameterError(problems[0])
        if problem:
            raise CaptureError(problem)
        if self._leaves_tensors:
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

    def _marked_arguments(self) -> str:
        """Takes from tensors among the arguments what a trace has set on them. Says which attribute that was."""
        problem = ""
        for attributes, held in self._of_arguments:
            changed = (key for key in {**held, **attributes} if attributes.get(key) is not held.get(key))
            if name := next((key for key in changed if not _SIZES_KEPT.fullmatch(key)), ""):
                attributes.clear()
                attributes.update(held)
                line = writer_of(name, self._found.codes)
                where = f" at {line}" if line else ""
                problem = (
                    f"The step sets {name} of a tensor among its arguments{where}. It would do so for those of this "
                    f"call, and never again: return it, or set it outside of the step."
                )
        return problem

    def _holds_new_tensor(self, things: Any) -> bool:
        """Whether tensors of the trace are in a nest. Those of the state may stand elsewhere (a sharded weight)."""
        leaves = tree_util.flatten(things)[0]
        return any(isinstance(leaf, Tensor) and id(leaf) not in self._known for leaf in leaves)

    def places(self) -> Iterator[tuple[Any, Any, Any, Any]]:
        """(container, key, then, now) of what is different."""
        for watch in self._watches:
            yield from ((watch.container, key, then, now) for key, _, then, now in watch.changed_items())

    @property
    def has_written_buffers(self) -> bool:
        """Whether arrays, or other memory that tensors may lie on, are among what is different."""
        views = (watch.container for watch in self._watches if isinstance(watch.container, ContentView))
        return any(isinstance(view.thing, BUFFERS) for view in views)

    def restore(self) -> None:
        """Puts back what the step changed."""
        for watch in self._watches:
            watch.restore()

    def sentence(self) -> str:
        """What the step changed first, and what to do instead."""
        path, then, now = next((one for one in self.changed if self._holds_new_tensor(one[2])), self.changed[0])
        hint = "Do it outside the step, or keep it in a tensor that the step writes to."
        if path.endswith((".last_epoch", "._last_lr", "._step_count")):
            hint = "Call scheduler.step() outside the step; rates are read at every call."
        elif isinstance(now, Tensor):
            hint = "Return the tensor instead, or write to one that stands there: copy_()."
        was, is_ = ("a tensor" if isinstance(one, Tensor) else repr(one) for one in (then, now))
        line = writer_of(path, self._found.codes)
        where = f" at {line}" if line else ""
        return (
            f"The step changes Python state{where}: {path} was {was}, is {is_} after one run. That would happen once, "
            f"while capturing, and never again. {hint}"
        )
