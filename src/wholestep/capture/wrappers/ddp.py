"""DistributedDataParallel: what its owner set, and a forward that calls the module inside and communicates nothing.

[Note: why no gradient is reduced twice]
The reducer of a wrapper expects gradients only after a forward that has prepared it for them. A compiled step's
forwards do not, so the hooks that it has put on parameters return at once, and work again after the next eager one.

[Note: which gradients a wrapper reduces]
Those of the parameters that trained when the module was wrapped, each once after a forward of the wrapper that was not
in ``no_sync()``. A gradient of a call of the module inside, of a second backward, or of ``torch.autograd.grad`` stays
local, since no reducer waits for it. A step keeps the same account.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from wholestep.capture.python import tree_util
from wholestep.capture.python.tracing_thread import on_this_thread
from wholestep.errors import CaptureError

log = logging.getLogger("wholestep")

BUILTIN_HOOKS: Any = dist.BuiltinCommHookType  # type: ignore[attr-defined] # public, and in no list of names
"""Names of the hooks for communication that are written in C++."""

SYNC_KEY = "require_backward_grad_sync"
"""Where a wrapper notes that it reduces gradients: False inside of ``no_sync()``."""

FORWARD_KEY = "require_forward_param_sync"
"""Where it notes that its last forward was one that a reduction follows: the next one synchronizes buffers."""

SETTINGS = (
    SYNC_KEY, "bucket_bytes_cap", "bucket_bytes_cap_default", "broadcast_buffers", "forward_sync_buffers",
    "parameters_to_ignore", "process_group", "mixed_precision", "training", "_join_config",
    "bucket_bytes_cap_list",
)  # fmt: skip
"""Attributes that every trace depends on. The others move with eager calls, or change no number."""


@dataclass(frozen=True, slots=True)
class DDPSettings:
    """What a wrapper was told."""

    group: dist.ProcessGroup
    bucket_bytes: int | None
    """None where its owner set no bound."""
    hooks: tuple[tuple[Any, Any], ...]
    """Each hook for communication with its state: a function, or a ``BuiltinCommHookType``."""


def settings_of(name: str, wrapper: DistributedDataParallel) -> DDPSettings:
    """What the owner of the wrapper `name` set. Raises CaptureError for settings that no graph keeps."""
    if wrapper.mixed_precision is not None:
        raise CaptureError(
            f"{name} is DistributedDataParallel(mixed_precision=...), which casts parameters in hooks of its own. "
            f"Leave it out and use torch.autocast in the step, or fully_shard with a MixedPrecisionPolicy."
        )
    if getattr(wrapper, "buffer_hook", None) is not None:
        raise CaptureError(
            f"{name} has a communication hook for buffers, which a graph does not call. Register none: buffers are "
            f"broadcast from rank 0."
        )
    if wrapper._join_config.enable:
        raise CaptureError(
            f"{name} is inside of join(): ranks whose data ends would answer its own reductions, and not those of a "
            f"graph. Give every rank as many batches, or call the step without wholestep there."
        )
    if getattr(wrapper, "bucket_bytes_cap_list", None):  # since torch 2.13
        log.warning(
            "%s has bounds for each bucket: all buckets get the one of %d bytes.", name, wrapper.bucket_bytes_cap
        )
    if wrapper._delay_all_reduce_params:
        raise CaptureError(
            f"{name} is DistributedDataParallel(delay_all_reduce_named_params=...), which reduces in a hook of its "
            f"own. Leave it out: a graph starts each reduction when its gradient is there, and waits where it is used."
        )
    if wrapper._use_python_reducer:
        raise CaptureError(
            f"{name} uses the reducer in Python of torch.compile. Leave torch._dynamo.config.optimize_ddp as it is "
            f"when the module is wrapped."
        )
    _seen.setdefault(wrapper, (None, False))
    return DDPSettings(
        group=wrapper.process_group,
        bucket_bytes=None if wrapper.bucket_bytes_cap_default else int(wrapper.bucket_bytes_cap),
        hooks=_hooks(wrapper),
    )


def _hooks(wrapper: DistributedDataParallel) -> tuple[tuple[Any, Any], ...]:
    if wrapper._comm_hooks:
        return tuple(wrapper._comm_hooks)
    # One that is written in C++ leaves its name in what is logged, and nothing in Python.
    name = str(wrapper._get_ddp_logging_data().get("comm_hook", "")).rpartition(".")[2]
    builtin = getattr(BUILTIN_HOOKS, name, None)
    return () if builtin is None else ((builtin, None),)


class _NoMemory(TorchDispatchMode):
    """Has what is asked of a reducer take no memory: it gives zeros of the size of all gradients."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.empty(0)


def reduced_parameters(wrapper: DistributedDataParallel) -> list[torch.Tensor]:
    """The parameters that the reducer of a wrapper has: those that trained when the module was wrapped."""
    try:
        with _NoMemory():  # type: ignore[no-untyped-call]
            buckets = wrapper.reducer._get_zeros_like_grad_buckets()
    except RuntimeError:  # a bucket for sparse gradients, before the first of them
        return [one for one in wrapper._build_params_for_reducer()[0] if _is_among(one, wrapper._module_parameters)]
    return [param for bucket in buckets for param in bucket.parameters()]


def _is_among(tensor: torch.Tensor, others: list[torch.Tensor]) -> bool:
    return any(tensor is one for one in others)


def managed(wrappers: Iterable[DistributedDataParallel]) -> frozenset[int]:
    """ids of the parameters whose gradients these wrappers reduce."""
    return frozenset[int]().union(*map(_reduced, wrappers))


def _reduced(wrapper: DistributedDataParallel) -> frozenset[int]:
    """Those of one, which are asked of its reducer once, and are there as long as it is."""
    reducer, found = _known.get(wrapper, (None, frozenset[int]()))
    if reducer is not wrapper.reducer:
        found = frozenset(map(id, reduced_parameters(wrapper)))
        _known[wrapper] = wrapper.reducer, found
    return found


_known: WeakKeyDictionary[DistributedDataParallel, tuple[Any, frozenset[int]]] = WeakKeyDictionary()


def facts_of_reducer(wrapper: DistributedDataParallel) -> dict[str, Any]:
    """What a trace depends on besides: the names of the parameters that the reducer has. They never change."""
    has = managed([wrapper])
    return {"reduced": tuple(name for name, one in wrapper.module.named_parameters() if id(one) in has)}


class _Account(threading.local):
    """Which gradients are reduced, by ids of parameters. Of each thread."""

    managed: frozenset[int] = frozenset()
    """Those that are reduced by some wrapper."""
    awaited: frozenset[int] = frozenset()
    """Those of them whose next gradient is."""
    came: frozenset[int] = frozenset()
    """Those whose gradient came in the backward that runs."""
    backwards: int = 0
    """How many backwards run, one within the other."""


_account = _Account()


def awaited() -> frozenset[int]:
    """ids of the parameters in wrappers whose next gradient is reduced."""
    return _account.awaited


@contextmanager
def with_awaited(params: frozenset[int]) -> Iterator[None]:
    """While open, the next gradients of these parameters are reduced, until a forward or a backward says otherwise."""
    around, _account.awaited = _account.awaited, params
    try:
        yield
    finally:
        _account.awaited = around


def is_managed(param: torch.Tensor) -> bool:
    """Whether a wrapper reduces gradients of a parameter."""
    return id(param) in _account.managed


def stays_local(param: torch.Tensor) -> bool:
    """Whether a wrapper that reduces gradients of a parameter does not reduce the one that comes now."""
    return is_managed(param) and id(param) not in _account.awaited


def note_gradient(param: torch.Tensor) -> None:
    """A gradient of the parameter was reduced. (A backward within another may give it another part.)"""
    if is_managed(param):
        _account.came |= {id(param)}


def note_reduced(params: frozenset[int]) -> None:
    """The next backward to run reduces gradients of these parameters: after it they are awaited no more."""
    _account.awaited -= params


@contextmanager
def a_backward() -> Iterator[None]:
    """Around a backward: what it reduces is awaited no more after the outermost one."""
    _account.backwards += 1
    try:
        yield
    finally:
        _account.backwards -= 1
        if _account.backwards == 0:
            _account.awaited -= _account.came
            _account.came = frozenset()


def synced_buffers(wrapper: DistributedDataParallel) -> list[torch.Tensor]:
    """The buffers that the next forward of a wrapper gives the values of the first rank.

    In evaluation, where none is written, those that any forward does: they travel if they were written before.
    """
    return [] if wrapper.training and not getattr(wrapper, FORWARD_KEY) else _broadcast_buffers(wrapper)


def _broadcast_buffers(wrapper: DistributedDataParallel) -> list[torch.Tensor]:
    """Those that a wrapper broadcasts at all."""
    named = wrapper.module.named_buffers() if wrapper.broadcast_buffers else ()
    return [one for name, one in named if name not in wrapper.parameters_to_ignore]


_seen: WeakKeyDictionary[DistributedDataParallel, tuple[Any, bool]] = WeakKeyDictionary()
"""Of the wrappers of steps their list of buffers, which each forward of their own makes anew as it gives them the first
rank's values, and what `FORWARD_KEY` was: both when they were last looked at, and the same on all ranks."""


def written_by_themselves() -> list[torch.Tensor]:
    """The buffers of those wrappers of steps that ran forwards of their own, in eager code, since this was last asked,
    and whose next forward would synchronize them. Before that they may differ."""
    found = []
    for wrapper, (buffers, was_awaited) in [*_seen.items()]:
        if not getattr(wrapper, FORWARD_KEY):
            _seen[wrapper] = buffers, False  # as in eager code they stay different
        elif not was_awaited or wrapper.modules_buffers is not buffers:
            _seen[wrapper] = wrapper.modules_buffers, True
            found += _broadcast_buffers(wrapper)
    return found


def settings_of_trace(wrapper: DistributedDataParallel) -> tuple[str, ...]:
    """Attributes of a wrapper that a trace depends on."""
    return (*SETTINGS, FORWARD_KEY) if wrapper.training and _synchronizes(wrapper) else SETTINGS


def changes_note(wrapper: DistributedDataParallel, is_awaited: bool) -> bool:
    """Whether calls of a trace, in which the last forward was such a one, have to note it in a wrapper."""
    is_known = wrapper.training and getattr(wrapper, FORWARD_KEY) == is_awaited  # a guard holds what it was
    return _synchronizes(wrapper) and not is_known


def _synchronizes(wrapper: DistributedDataParallel) -> bool:
    return bool(wrapper.broadcast_buffers) and next(wrapper.module.buffers(), None) is not None


def _is_awaited(wrapper: DistributedDataParallel) -> bool:
    """Whether a forward that begins now is followed by a backward whose gradients are reduced, as far as one knows."""
    return torch.is_grad_enabled() and bool(wrapper.require_backward_grad_sync)


def set_awaited(wrapper: DistributedDataParallel, is_awaited: bool) -> None:
    """Notes in a wrapper what its last forward was, as that does itself: after one that no reduction follows, the next
    one gives buffers no values of the first rank."""
    setattr(wrapper, FORWARD_KEY, is_awaited)
    if wrapper in _seen:
        _seen[wrapper] = _seen[wrapper][0], is_awaited


def _note_forward(wrapper: DistributedDataParallel) -> None:
    if _is_awaited(wrapper):
        _account.awaited |= {id(param) for param in wrapper.module.parameters()} & _account.managed


def _sync_buffers(wrapper: DistributedDataParallel) -> None:
    """Gives buffers the values of the first rank, as a forward does after one that a reduction follows."""
    group, by_dtype = wrapper.process_group, dict[torch.dtype, list[torch.Tensor]]()
    for buffer in _broadcast_buffers(wrapper):
        by_dtype.setdefault(buffer.dtype, []).append(buffer)
    with torch.no_grad():
        for buffers in by_dtype.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            dist.broadcast(flat, dist.get_global_rank(group, 0), group=group)
            for buffer, part in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
                buffer.data.copy_(part.view(buffer.shape))  # graphs that have saved it may go on


@contextmanager
def silent_forwards(
    params: frozenset[int], note: Callable[[DistributedDataParallel, bool], None] = set_awaited
) -> Iterator[None]:
    """While open, forwards of wrappers on this thread communicate nothing, and are noted.

    Args:
        params: ids of the parameters whose gradients the wrappers of a step reduce; see `managed`. Those of a step
            around this one stay so.
        note: called after a forward, with the wrapper and whether a reduction follows; see `set_awaited`.
    """
    original, awaited_last = DistributedDataParallel.forward, dict[int, bool]()

    def forward(wrapper: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
        _note_forward(wrapper)
        if awaited_last.get(id(wrapper)):
            _sync_buffers(wrapper)
        awaited_last[id(wrapper)] = _is_awaited(wrapper)
        if wrapper.device_ids:
            device = torch.device(wrapper.device_type, wrapper.device_ids[0])
            leaves, spec = tree_util.flatten((inputs, kwargs))
            leaves = [leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            inputs, kwargs = tree_util.unflatten(leaves, spec)
        output = wrapper.module(*inputs, **kwargs)
        note(wrapper, _is_awaited(wrapper))
        return output

    silent = on_this_thread(forward, original)
    around = _account.managed
    with patch.object(DistributedDataParallel, "forward", silent), with_awaited(frozenset()):
        _account.managed = around | params
        try:
            yield
        finally:
            _account.managed = around
