"""Gradients that live inside of a call, as they did in the older surface.

A step there starts with no gradients and leaves none: ``.grad`` of the user's parameters is not touched, and two
calls without ``zero_grad`` in between do not add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from wholestep.capture.reach.reachable import Reachable


class LocalGradients:
    """The gradients of every parameter and buffer that one step can reach."""

    def __init__(self) -> None:
        self._tensors: dict[int, torch.Tensor] = {}
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """While open, the known tensors have no gradient; afterwards they have the one they had."""
        self._hide_known()
        try:
            yield
        finally:
            for tensor, grad in self._saved:
                tensor.grad = grad
            self._saved.clear()

    def add(self, found: Reachable) -> None:
        """Makes what a step was found to reach known."""
        for _, module in found.modules.values():
            self._tensors.update((id(tensor), tensor) for tensor in (*module.parameters(), *module.buffers()))
        for _, opt in found.optimizers.values():
            self._tensors.update((id(param), param) for group in opt.param_groups for param in group["params"])
        loose = (tensor for _, tensor in found.tensors.values())
        self._tensors.update((id(tensor), tensor) for tensor in loose if tensor.is_leaf and tensor.requires_grad)
        self._hide_known()

    def clearing_after(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """`step`, leaving no gradient behind: in its graph gradients are intermediates and not results."""

        def whole(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            for tensor in self._tensors.values():
                tensor.grad = None
            return result

        # Not functools.wraps, which would pass it off as a function of the user's module.
        whole.__name__ = getattr(step, "__name__", type(step).__name__)
        whole.__wrapped__ = step  # type: ignore[attr-defined]
        return whole

    def _hide_known(self) -> None:
        with_grad = [(tensor, tensor.grad) for tensor in self._tensors.values() if tensor.grad is not None]
        for tensor, grad in with_grad:
            self._saved.append((tensor, grad))
            tensor.grad = None
