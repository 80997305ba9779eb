"""Communication hooks of DistributedDataParallel: what they are called with, and whether they become part of a graph.

[Note: traced hooks]
A hook that reads no Python state is traced: its collectives are nodes as any others. One that reads some (a counter, a
memory of errors, a list that it grows) would go stale in a graph, so it is called as it is, at every run.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor

from wholestep.capture.python.code_names import FUNCTION_PARTS
from wholestep.capture.python.tracing_thread import capture_flag
from wholestep.capture.reach.reachability import find_reachable
from wholestep.capture.tracing.process_group_rules import RULES
from wholestep.capture.tracing.process_groups import ProcessGroupRecorder
from wholestep.config import CommHook
from wholestep.errors import ConfigError

_STATELESS = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type, dist.ProcessGroup, type(None))


class HookBucket:
    """What a hook is called with: the methods of ``torch.distributed.GradBucket``, on a bucket of the graph."""

    def __init__(self, flat: Tensor, index: int, is_last: bool, split: Callable[[Tensor], Sequence[Tensor]]) -> None:
        """`flat`: one dimension. `split` gives the gradients in it, in the shapes of their parameters."""
        self._flat, self._index, self._is_last, self._split = flat, index, is_last, split

    def buffer(self) -> Tensor:
        """The gradients of this rank, of one dimension."""
        return self._flat

    def set_buffer(self, buffer: Tensor) -> None:
        """Has `buffer` return another tensor of as many elements."""
        self._flat = buffer

    def index(self) -> int:
        """The number of the bucket in the step."""
        return self._index

    def is_last(self) -> bool:
        """Whether it is the last bucket of the step."""
        return self._is_last

    def gradients(self) -> list[Tensor]:
        """The gradients, in the shapes of their parameters."""
        return list(self._split(self._flat))

    def parameters(self) -> NoReturn:
        """Raises ConfigError: the buckets of a graph hold gradients alone."""
        raise ConfigError(
            "A communication hook asks for bucket.parameters(). A bucket of a compiled step holds gradients alone: use "
            "bucket.gradients(), or keep the parameters in the state of the hook."
        )


@dataclass(frozen=True, slots=True)
class HookCall:
    """A hook on one bucket. Called with the gradients, of one dimension, it gives them reduced."""

    how: CommHook
    index: int
    is_last: bool
    split: Callable[[Tensor], Sequence[Tensor]]

    @property
    def name(self) -> str:
        """What messages call the hook."""
        return str(getattr(self.how.hook, "__name__", type(self.how.hook).__name__))

    def __call__(self, flat: Tensor) -> Tensor:
        """Raises ConfigError where the hook gives something else than a tensor, or a future of one, of that size."""
        bucket = HookBucket(flat, self.index, self.is_last, self.split)
        result = self.how.hook(self.how.state, bucket)
        if not isinstance(result, Tensor) and hasattr(result, "wait"):  # a future, whose class may be a private one
            result = result.wait()
        while isinstance(result, (list, tuple)) and len(result) == 1:
            result = result[0]
        if not isinstance(result, Tensor) or result.numel() != flat.numel():
            got = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise ConfigError(
                f"The communication hook {self.name} has to give a tensor of {flat.numel()} elements, or a future of "
                f"one, got {got}."
            )
        return result.reshape(flat.shape).to(flat.dtype)

    def traced(self, flat: Tensor) -> Tensor:
        """The same while it is traced: what it starts on process groups becomes collectives of the graph."""
        groups = ProcessGroupRecorder()
        with ExitStack() as stack:
            stack.enter_context(capture_flag())
            for one in groups.patches(RULES):
                stack.enter_context(one)
            result = self(flat.clone())  # a hook may write to its bucket
            groups.finish()
        return result


def reads_state(how: CommHook) -> str:
    """What Python state a hook reads, by name, so that a trace of it could go stale; empty if none."""
    if not isinstance(how.state, _STATELESS):
        return f"its state, a {type(how.state).__name__}"
    return _read_by(how.hook)


def _read_by(hook: Any) -> str:
    if not isinstance(hook, types.FunctionType):
        return "" if isinstance(hook, types.BuiltinFunctionType) else f"a {type(hook).__name__}"
    for name, cell in zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True):
        held = cell.cell_contents
        if not isinstance(held, _STATELESS):
            return name
        if isinstance(held, types.FunctionType) and (inner := _read_by(held)):  # one hook around another
            return inner
    found = find_reachable(hook, (), {})
    for snapshot in found.snapshots:
        held = snapshot.held if isinstance(snapshot.held, dict) else dict(enumerate(snapshot.held))
        for key, value in held.items():
            if not isinstance(value, _STATELESS) and key not in FUNCTION_PARTS:  # what they hold comes up by itself
                return f"{key} of {snapshot.path}"
    others = (*found.tensors.values(), *found.generators.values())
    return next(iter([*(name for name, _ in others), *(one.name for one in found.hidden)]), "")
