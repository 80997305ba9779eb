"""The function that every backward of autograd goes through, replaced for a time; what a backward reaches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from wholestep.capture.python.tracing_thread import on_this_thread

Engine = Callable[..., Any]
"""``(tensors, grads, keep, create, inputs, *rest, **kw)``: ``backward`` and ``torch.autograd.grad`` end in it."""


@contextmanager
def backward_replaced(make: Callable[[Engine], Engine]) -> Iterator[None]:
    """While open, backwards of this thread go through what `make` gives for the function that runs them otherwise."""
    engine = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    with patch.object(torch.autograd, "_engine_run_backward", on_this_thread(make(engine), engine)):
        yield


def leaves_behind(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The leaves on which a backward from `tensor`, which is none itself, would leave gradients."""
    seen, stack, leaves = set[Any](), [tensor.grad_fn], list[torch.Tensor]()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        stack.extend(following for following, _ in node.next_functions)
    return leaves
