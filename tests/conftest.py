"""Defaults of every test: one thread per process, because the ranks of a test share the cores."""

import os

# Before torch is imported by any test: OpenMP reads it once. Spawned ranks inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator

import pytest
import torch.distributed as dist

pytest_plugins = ["tests.pools"]


@pytest.fixture(scope="module", autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """Ends a group that a file of tests, or a helper of it, has started in this process."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
