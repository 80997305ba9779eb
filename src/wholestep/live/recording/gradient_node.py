"""The node of the autograd graph that has made a tensor."""

from __future__ import annotations

from typing import Any

import torch


def gradient_node(tensor: torch.Tensor) -> Any:
    """``tensor.grad_fn``; None also where torch allows none.

    That is a view that was made without gradients, on memory that was written to since. Eager code that computes on
    without gradients never asks, and torch raises an error for the question.
    """
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def is_leaf(tensor: torch.Tensor) -> bool:
    """``tensor.is_leaf``, which asks the same."""
    return gradient_node(tensor) is None
