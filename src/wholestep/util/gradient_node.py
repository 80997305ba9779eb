"""The node of the autograd graph that has made a tensor, where torch may be asked.

[Note: views that have no graph]
A view that was made without gradients, on memory that was written to since, may not become part of a graph, and torch
raises an error for the mere question. Eager code that computes on without gradients never asks, so we may not either.
"""

from __future__ import annotations

from typing import Any

import torch


def gradient_node(tensor: torch.Tensor) -> Any:
    """``tensor.grad_fn``, or None."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def is_leaf(tensor: torch.Tensor) -> bool:
    """``tensor.is_leaf``."""
    return gradient_node(tensor) is None


def askable(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor, or another one on its memory where torch may not be asked, or takes it for a view that it no longer is.

    Who assigns to ``.data`` of a view gives it other memory, and torch still has the base that it was a view of.
    """
    try:
        is_leaf = tensor.is_leaf
    except RuntimeError:
        return tensor.detach()
    if is_leaf and tensor._is_view() and _has_left(tensor, tensor._base):
        return tensor.detach().requires_grad_(tensor.requires_grad)
    return tensor


def _has_left(view: torch.Tensor, base: torch.Tensor | None) -> bool:
    """Whether a view is on other memory than its base."""
    if base is None or not view.layout is base.layout is torch.strided:
        return False
    return bool(view.untyped_storage()._cdata != base.untyped_storage()._cdata)
