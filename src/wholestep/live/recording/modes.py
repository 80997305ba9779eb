"""The modes of torch that a tensor call depends on besides its arguments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from wholestep.capture.wrappers import ddp

Modes = tuple[Any, ...]
"""Gradient mode, inference mode, default dtype, of autocast the cache and (device, dtype) of each device, and the
wrappers whose gradients stay local (``no_sync()``)."""

_DEVICES = ("cpu", "cuda")


def current_modes() -> Modes:
    """The modes at this moment, of this thread. Asked for at every recorded call."""
    casts: tuple[tuple[str, torch.dtype], ...] = ()
    if torch._C._is_any_autocast_enabled():
        if torch.is_autocast_enabled("cpu"):
            casts = (("cpu", torch.get_autocast_dtype("cpu")),)
        if torch.is_autocast_enabled("cuda"):
            casts = (*casts, ("cuda", torch.get_autocast_dtype("cuda")))
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
        torch.is_autocast_cache_enabled(), casts, ddp.unsynced(),
    )  # fmt: skip


def _casts(device: str) -> bool:
    return torch.is_autocast_enabled(device)


@contextmanager
def under(modes: Modes) -> Iterator[None]:
    """While open, these modes hold."""
    grad, inference, dtype, caches, casts, unsynced = modes
    dtype_around = torch.get_default_dtype()
    with ExitStack() as stack:
        if inference != torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(inference))
        stack.enter_context(torch.set_grad_enabled(grad))
        for device in _DEVICES:
            wanted = dict(casts).get(device)
            if wanted is not None or _casts(device):
                stack.enter_context(
                    torch.autocast(device, dtype=wanted, enabled=wanted is not None, cache_enabled=caches)
                )
        stack.enter_context(ddp.with_unsynced(unsynced))
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype_around)


def why_not_recordable() -> str:
    """Why a call at this moment does more than its function and arguments say; empty if it does not."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "hooks on saved tensors are set here (torch.utils.checkpoint does that, or save_on_cpu)"
    if torch._C._len_torch_dispatch_stack() > 0:
        return "a TorchDispatchMode of yours looks at every operator here"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func (vmap, grad, jvp) runs here"
    if torch.is_anomaly_enabled():
        return "detection of anomalies is on"
    return ""
