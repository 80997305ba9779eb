"""Switches of torch, put back after a test: others run in the same process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """While it is open, torch takes algorithms that give the same bits every time, where it has them."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
