"""Runs operators exactly as a program has them: without gradients or autocast.

What autocast adds to a step is traced with it, so it stands in the graph. If the caller's autocast were on where a
graph is run, rewritten or compiled, it would cast once more what the step had it leave alone
(``autocast(enabled=False)`` around a loss).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_autocast() -> Iterator[None]:
    """While open, operators compute what they say."""
    with torch.no_grad(), torch._C._DisableAutocast():
        yield
