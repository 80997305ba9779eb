"""A rank of a pool as torchrun starts one: what libraries ask the environment for, and keep."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch.distributed as dist


@contextmanager
def launched() -> Iterator[None]:
    """While open, accelerate and Lightning find this rank. Around it, what accelerate keeps is forgotten."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    found = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "NODE_RANK": "0"}
    with patch.dict(os.environ, found):
        _forget()
        try:
            yield
        finally:
            _forget()


def _forget() -> None:
    if (state := sys.modules.get("accelerate.state")) is not None:
        for kind in (state.AcceleratorState, state.GradientState, state.PartialState):
            kind._shared_state.clear()
