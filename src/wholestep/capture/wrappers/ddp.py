"""DistributedDataParallel: what its owner set, and a forward that calls the module inside and communicates nothing.

[Note: why no gradient is reduced twice]
The reducer of a wrapper expects gradients only behind a forward that has prepared it for them. A compiled step's
forwards do not, so the hooks that it has put on parameters return at once, and work again behind the next eager one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from wholestep.capture.python import tree_util
from wholestep.capture.python.tracing_thread import on_this_thread
from wholestep.errors import ConfigError

log = logging.getLogger("wholestep")

BUILTIN_HOOKS: Any = dist.BuiltinCommHookType  # type: ignore[attr-defined] # public, and in no list of names
"""Names of the hooks for communication that are written in C++."""

SYNC_KEY = "require_backward_grad_sync"
"""Where a wrapper notes that it reduces gradients: False inside of ``no_sync()``."""

SETTINGS = (
    SYNC_KEY, "bucket_bytes_cap", "bucket_bytes_cap_default", "broadcast_buffers", "forward_sync_buffers",
    "parameters_to_ignore", "process_group", "mixed_precision", "training", "_join_config", "bucket_bytes_cap_list",
)  # fmt: skip
"""Attributes that a trace depends on. The others move with eager calls, or change no number."""


@dataclass(frozen=True, slots=True)
class DDPSettings:
    """What a wrapper was told."""

    group: dist.ProcessGroup
    bucket_bytes: int | None
    """None where its owner set no bound."""
    broadcast_buffers: bool
    ignored: frozenset[str]
    """Names, inside of the module, of parameters whose gradients stay local."""
    hooks: tuple[tuple[Any, Any], ...]
    """Each hook for communication with its state: a function, or a ``BuiltinCommHookType``."""


def settings_of(name: str, wrapper: DistributedDataParallel) -> DDPSettings:
    """What the owner of the wrapper `name` set. Raises ConfigError for settings that no graph can keep."""
    if wrapper.mixed_precision is not None:
        raise ConfigError(
            f"{name} is DistributedDataParallel(mixed_precision=...), which casts parameters in hooks of its own. "
            f"Leave it out and use torch.autocast in the step, or fully_shard with a MixedPrecisionPolicy."
        )
    if getattr(wrapper, "buffer_hook", None) is not None:
        raise ConfigError(
            f"{name} has a communication hook for buffers, which a graph does not call. Register none: buffers are "
            f"broadcast from rank 0."
        )
    if wrapper._join_config.enable:
        raise ConfigError(
            f"{name} is inside of join(): ranks whose data ends would answer its own reductions, and not those of a "
            f"graph. Give every rank as many batches, or call the step without wholestep there."
        )
    if getattr(wrapper, "bucket_bytes_cap_list", None):  # since torch 2.13
        log.warning(
            "%s has bounds for each bucket: all buckets get the one of %d bytes.", name, wrapper.bucket_bytes_cap
        )
    if wrapper._use_python_reducer:
        raise ConfigError(
            f"{name} uses the reducer in Python of torch.compile. Leave torch._dynamo.config.optimize_ddp as it is "
            f"when the module is wrapped."
        )
    return DDPSettings(
        group=wrapper.process_group,
        bucket_bytes=None if wrapper.bucket_bytes_cap_default else int(wrapper.bucket_bytes_cap),
        broadcast_buffers=bool(wrapper.broadcast_buffers),
        ignored=frozenset(wrapper.parameters_to_ignore),
        hooks=_hooks(wrapper),
    )


def _hooks(wrapper: DistributedDataParallel) -> tuple[tuple[Any, Any], ...]:
    if wrapper._comm_hooks:
        return tuple(wrapper._comm_hooks)
    # One that is written in C++ leaves its name in what is logged, and nothing in Python.
    name = str(wrapper._get_ddp_logging_data().get("comm_hook", "")).rpartition(".")[2]
    builtin = getattr(BUILTIN_HOOKS, name, None)
    return () if builtin is None else ((builtin, None),)


Wrappers = tuple[DistributedDataParallel, ...]


class _LastForwards(threading.local):
    """Which wrappers ran their last forward in ``no_sync()``, so that their gradients stay local. Of each thread."""

    unsynced: Wrappers = ()


_last_forwards = _LastForwards()


def unsynced() -> Wrappers:
    """The wrappers whose gradients stay local at this moment."""
    return _last_forwards.unsynced


@contextmanager
def with_unsynced(wrappers: Wrappers) -> Iterator[None]:
    """While open, the gradients of these wrappers stay local, until a forward says otherwise."""
    around, _last_forwards.unsynced = _last_forwards.unsynced, wrappers
    try:
        yield
    finally:
        _last_forwards.unsynced = around


def is_unsynced(param: torch.Tensor) -> bool:
    """Whether the gradient of a parameter stays local at this moment."""
    return any(param is one for wrapper in _last_forwards.unsynced for one in wrapper.module.parameters())


def _note_forward(wrapper: DistributedDataParallel) -> None:
    if torch.is_grad_enabled():  # else no backward comes behind it
        others = tuple(one for one in _last_forwards.unsynced if one is not wrapper)
        _last_forwards.unsynced = others if wrapper.require_backward_grad_sync else (*others, wrapper)


@contextmanager
def silent_forwards() -> Iterator[None]:
    """While open, forwards of wrappers on this thread communicate nothing, and those in ``no_sync()`` are noted."""
    original = DistributedDataParallel.forward

    def forward(wrapper: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
        _note_forward(wrapper)
        if wrapper.device_ids:
            device = torch.device(wrapper.device_type, wrapper.device_ids[0])
            leaves, spec = tree_util.flatten((inputs, kwargs))
            leaves = [leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            inputs, kwargs = tree_util.unflatten(leaves, spec)
        return wrapper.module(*inputs, **kwargs)

    silent = on_this_thread(forward, original)
    with patch.object(DistributedDataParallel, "forward", silent), with_unsynced(()):
        yield
