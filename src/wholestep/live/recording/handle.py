"""Handles: tensors without numbers, which a recorded call returns until its piece runs."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from wholestep.capture.scalars.symbol_views import asks_outside_torch
from wholestep.capture.tracing.tensor_swap import swap_contents
from wholestep.live.recording.record import OutputMeta


class Recorder(Protocol):
    """What records the calls of a live step; see `wholestep.live.run.Run`."""

    def called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a torch function."""

    def called_module(
        self, plain: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call of a module; `plain` is what runs its Python."""

    def call_of(self, function: Any) -> nn.Module | None:
        """The module whose call is that of an ``autograd.Function``; None if it is to run at once."""
        return None

    def note_made(self, module: nn.Module) -> None:
        """The step has made a module."""
        return

    def unrecorded(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], why: str) -> Any:
        """A call that is executed at once, and keeps its run from making a path."""

    def flush(self, why: str) -> None:
        """Runs what is recorded, so that all handles are tensors."""

    def before_another_thread_calls(self, module: nn.Module) -> None:
        """Runs what is recorded if it may write to parameters of a module that another thread is about to call."""

    def before_draws_are_told(self, function: Any) -> None:
        """Runs what is recorded to draw: a function is about to tell or to set where random generators stand."""

    def before_ranks_communicate(self, function: Any) -> None:
        """Runs what is recorded: a function is about to wait for other ranks, and those may wait in a piece."""


class RecordingRun(Recorder, Protocol):
    """One that records; others execute each call at once."""

    def note_reshard(self, module: FSDPModule) -> None:
        """A module of ``fully_shard`` is told to drop what it has gathered."""

    def gathering(self) -> list[FSDPModule]:
        """Modules of ``fully_shard`` whose recorded call would have gathered what they have now."""


class Executor(Protocol):
    """What executes the calls of a live step, where that is more than to call."""

    def execute(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Executes a call of the step's own Python."""


class _Current(threading.local):
    run: Recorder | None = None
    """The live step that runs on this thread, while its own Python runs. None while a call of it is executed."""
    executor: Executor | None = None
    """What executes its calls; None where that is to call."""


CURRENT = _Current()
"""What this thread does of a live step."""

RUNS: dict[int, RecordingRun] = {}
"""The live steps that run in this process, by the thread."""


def with_torch_functions(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls it where torch asks the classes of tensors what to do, as it does outside of our own code."""
    with torch._C._EnableTorchFunction():
        return function(*args, **kwargs)


def execute(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Executes a call of the step's own Python as if nothing was recorded: tensors may be of classes of their own.

    Our mode is off: layers of torch compute otherwise where one is on, as encoders do in evaluation. The user's are on.
    """
    executor = CURRENT.executor
    with recording_paused(keeps_modes=True):
        if executor is None:
            return with_torch_functions(function, args, kwargs)
        return with_torch_functions(executor.execute, (function, args, kwargs), {})


class RecordingMode(TorchFunctionMode):
    """While open, calls of torch by this thread go to its live step."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = CURRENT.run
        return func(*args, **(kwargs or {})) if run is None else run.called(func, args, kwargs or {})


def is_looked_into() -> bool:
    """Whether the step has entered a function mode, of the user's or a `torch.device`, above ours.

    It looks at each call of torch that is made in there and may change it: no call of torch's own Python is a record.
    """
    return _modes_above_ours() > 0


def _modes_above_ours() -> int:
    """How many function modes are on above ours; -1 if ours is not on."""
    count = torch._C._len_torch_function_stack()
    for place in reversed(range(count)):
        if type(torch._C._get_function_stack_at(place)) is RecordingMode:
            return count - 1 - place
    return -1


def recording_paused(*, keeps_modes: bool = False) -> AbstractContextManager[None]:
    """While open, calls of torch by this thread are torch's own and ours: none is recorded, and no mode of ours is on.

    Nor is one that the step has entered, which has seen the calls that are recorded; but with `keeps_modes`. (Guards
    take a function mode that is on for a change. Torch itself takes ours off while it handles a call.)
    """
    return _Paused(keeps_modes)


class _Paused(AbstractContextManager[None]):
    """No generator: each call of a module opens one, and a generator costs two microseconds more."""

    __slots__ = ("_around", "_keeps_modes", "_modes")

    def __init__(self, keeps_modes: bool) -> None:
        self._keeps_modes = keeps_modes

    def __enter__(self) -> None:
        self._around, CURRENT.run = CURRENT.run, None
        self._modes = _popped(_modes_above_ours() + 1)
        if self._keeps_modes:
            _push(self._modes[1:])

    def __exit__(self, *error: object) -> None:
        if self._keeps_modes:
            _popped(len(self._modes[1:]))
        _push(self._modes)
        CURRENT.run = self._around


def _popped(count: int) -> list[Any]:
    """So many function modes from the top of the stack, the lowest first."""
    return [torch._C._pop_torch_function_stack() for _ in range(count)][::-1]


def _push(modes: list[Any]) -> None:
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)


class Handle(torch.Tensor):
    """A tensor whose numbers are not known yet. `fulfil` makes it an ordinary one.

    Python's calls of torch come to the function mode of the live step. What comes here has gone around it: C++ code, or
    another thread, for which all that is recorded runs.
    """

    run: Recorder
    _wholestep_class = torch.Tensor

    def _shown(self) -> type:
        return torch.Tensor if asks_outside_torch(sys._getframe(1)) else type(self)

    __class__ = property(_shown, object.__dict__["__class__"].__set__)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if CURRENT.run is not None:
            return CURRENT.run.called(func, args, kwargs)
        _flush(func, args, kwargs)
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C._PreserveDispatchKeyGuard():  # C++ has left autograd by now, and recorded calls go through it
            torch._C._dispatch_tls_set_dispatch_key_excluded("AutogradFunctionality", False)
            _flush(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _flush(function: Any, args: Any, kwargs: dict[str, Any]) -> None:
    handles = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if type(leaf) is Handle]
    for handle in handles:
        if type(handle) is Handle:
            vars(handle)["run"].flush(f"{function} was called by C++ code or by another thread")


def made(meta: OutputMeta, run: Recorder) -> Handle:
    """A handle of this kind, which `run` will fulfil."""
    handle: Handle = torch.Tensor._make_wrapper_subclass(
        Handle, meta.shape, strides=meta.stride, dtype=meta.dtype, device=meta.device, requires_grad=meta.requires_grad
    )
    handle.run = run
    return handle


def as_eager_gives(result: torch.Tensor, meta: OutputMeta) -> torch.Tensor:
    """The result of a piece as eager code would have it: with a graph that a backward has freed, or with none.

    A graph computes without gradients and may give two results on one memory. So a result may be a view that torch has
    marked as made under ``no_grad``, of another result or of a parameter, and count as one that requires grad since
    that does. Python is given a tensor of its own on this memory, and nothing is set on the result itself.
    """
    if meta.graph and type(result.grad_fn).__name__ == meta.graph:  # it ran as eager code
        return result
    result = result.detach()
    if not meta.graph:
        return result.requires_grad_(meta.requires_grad)
    with torch.enable_grad():
        freed: torch.Tensor = _freed_graph(meta.graph).apply(result.requires_grad_())
    return freed


@functools.cache
def _freed_graph(name: str) -> Any:
    """A function whose graph node has this name, and no way back."""

    def forward(ctx: Any, result: torch.Tensor) -> torch.Tensor:
        return result.detach()

    def backward(ctx: Any, grad: torch.Tensor) -> None:
        raise RuntimeError(
            "Trying to backward through the graph a second time. The backward in the compiled step has freed it; use "
            "retain_graph=True there."
        )

    function = type(
        name, (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    )
    function._backward_cls.__name__ = name  # type: ignore[attr-defined]
    return function


def fulfil(handle: torch.Tensor, result: torch.Tensor) -> None:
    """Makes a handle the tensor that its call has given. Everybody who holds the handle then holds that tensor.

    A result that others hold stays theirs: the handle becomes a tensor on the same memory.
    """
    if handle is result:
        return
    if type(result) is not torch.Tensor or sys.getrefcount(result) > _OWNED:
        result = (
            result.detach().requires_grad_(result.requires_grad) if result.grad_fn is None else result.view_as(result)
        )
    vars(handle).pop("run", None)
    handle.__class__ = torch.Tensor
    swap_contents(handle, result)


_OWNED = 3
"""References to a result that nobody but the caller of `fulfil` holds: its variable, our parameter, the count's."""
