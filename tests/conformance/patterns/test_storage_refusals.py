"""Storage that is read, written or returned while it is free has no right graph: refused, with the line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conformance.patterns.pattern import (
    free,
    refused,
    row,
)


def read_later(x: Tensor) -> Tensor:
    free(x)
    return x * 2


def read_unfilled(x: Tensor) -> Tensor:
    free(x)
    x.untyped_storage().resize_(x.numel() * 4)
    return x * 2


def added_to_unfilled(x: Tensor) -> None:
    free(x)
    x.untyped_storage().resize_(x.numel() * 4)
    x.add_(1)


def written_while_freed(x: Tensor) -> None:
    free(x)
    x.fill_(1)


def returned_while_freed(x: Tensor) -> Tensor:
    free(x)
    return x


def view_returned(x: Tensor) -> Tensor:
    y = x[:2]
    free(x)
    return y


def needed_by_backward(x: Tensor) -> Tensor:
    w = torch.ones(4, requires_grad=True)
    loss = (w * x).sum()
    free(x)
    return torch.autograd.grad(loss, w)[0]


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (read_later, r"reads argument tensor 0, whose storage was freed at .*:\d+"),
        (read_unfilled, r"reads argument tensor 0, whose storage was allocated at .* and not filled"),
        (added_to_unfilled, "whose storage was allocated at .* and not filled"),
        (written_while_freed, "writes to argument tensor 0, whose storage was freed at"),
        (returned_while_freed, "the step returns argument tensor 0, whose storage was freed"),
        (view_returned, "the step returns argument tensor 0, whose storage was freed"),
        (needed_by_backward, "reads argument tensor 0, whose storage was freed"),
        (lambda x: x.untyped_storage().resize_(4), "resized to 4 bytes, and the tensor in it.*needs 16"),
        (lambda x: x.untyped_storage().resize_(64), "resized to 64 bytes, and the tensor in it.*needs 16"),
        (lambda x: x.resize_(7).zero_(), "other storage or another shape at"),
        (lambda x: x.set_(torch.ones(4)), "other storage or another shape at"),
    ],
)
@row("storage_resize_zero")
def test_storage_that_cannot_be_right_is_refused(step: Callable[..., Any], text: str) -> None:
    refused(step, torch.randn(4), text=text)


@row("storage_resize_zero")
def test_an_assignment_to_data_of_an_argument_is_refused() -> None:
    def step(x: Tensor) -> Tensor:
        x.data = x.data * 2
        return x + 1

    refused(step, torch.randn(4), text="other storage or another shape")


@row("storage_resize_zero")
def test_freed_parts_of_a_larger_storage_are_refused() -> None:
    refused(free, torch.randn(8)[:4], text="resized to 0 bytes, and the tensor in it, .*is a part of it")
    whole = torch.randn(8)
    refused(lambda a, b: free(a), whole, whole.view(2, 4), text="which share it")


@row("storage_resize_nonzero")
def test_an_argument_that_comes_freed_is_not_read() -> None:
    x = torch.randn(4)
    free(x)
    refused(lambda x: x + 1, x, text="argument tensor 0, whose storage was freed already when the step was called")
