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
    """A tensor, or another one on its memory where torch may not be asked."""
    try:
        tensor.is_leaf  # noqa: B018
    except RuntimeError:
        return tensor.detach()
    return tensor
