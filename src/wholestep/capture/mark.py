"""Marks the gradient that a parameter ends up with, where the backward leaves it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from wholestep.program import ops


@contextmanager
def marked_gradients(params: dict[int, tuple[str, torch.Tensor]]) -> Iterator[None]:
    """While open, every accumulated ``.grad`` of these parameters carries a marker with the parameter's name.

    The marker comes first among a parameter's post-accumulate hooks, so hooks of the user see the gradient
    that the optimizer will see. Hooks live on the tensor's implementation, which tracing swaps: setting them
    again puts them, and hooks on the gradient, on the one in place now.
    """
    saved: list[tuple[torch.Tensor, Any]] = []
    for name, param in params.values():
        if param._backward_hooks:
            param._backward_hooks = param._backward_hooks
        if not (param.is_leaf and param.requires_grad):
            continue
        theirs = param._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        saved.append((param, theirs))
        hooks: OrderedDict[Any, Any] = OrderedDict({"wholestep": _hook(name)})
        hooks.update(theirs or {})
        param._post_accumulate_grad_hooks = hooks  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for param, theirs in saved:
            param._post_accumulate_grad_hooks = theirs  # type: ignore[attr-defined]


def _hook(name: str) -> Callable[[torch.Tensor], None]:
    def mark(param: torch.Tensor) -> None:
        grad = param.grad
        if grad is None:
            return
        marked = ops.GRADIENT(grad, name)
        if getattr(grad, "_wholestep_entry", False):
            # The gradient was there before the call: others may hold it, so it is written, not replaced.
            with torch.no_grad():
                grad.copy_(marked)
        else:
            param.grad = marked

    return mark
