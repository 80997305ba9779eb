"""Pools of worker processes, so that a test on several ranks costs milliseconds and not the import of torch.

    def check(scale):                       # at the top level of the test module
        world = wholestep.run.world.init()  # gloo, on the CPU
        ...
        return plain_data_or_tensors

    def test_it(pool2):
        first, second = pool2.run(check, 3.0)

An error on a rank is raised in the test with its own class. Expect it there, or (quicker, as the pool then needs no
repair) with `pytest.raises` inside of the function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from wholestep.run.launch import Workers
from wholestep.run.world import close_current, enter

COLLECTIVE_TIMEOUT_S = 60.0


class Pool:
    """Workers that are started when first used, and made anew after a failure that may have left traces."""

    def __init__(self, nproc: int) -> None:
        self.nproc = nproc
        self._workers: Workers | None = None

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 120.0, grace_s: float = 5.0) -> list[Any]:
        """``fn(*args)`` on every rank; the results in rank order. Errors as in `wholestep.run.world.run`."""
        if self._workers is None:
            setup = functools.partial(enter, "gloo", COLLECTIVE_TIMEOUT_S)
            self._workers = Workers(self.nproc, setup, close_current)
        try:
            task = functools.partial(from_a_clean_state, fn)
            return self._workers.call(task, args, timeout_s=timeout_s, grace_s=grace_s)
        except BaseException:
            self._repair()
            raise

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _repair(self) -> None:
        """New process groups when every rank has reported, else new processes at the next call."""
        workers, self._workers = self._workers, None
        assert workers is not None
        if workers.healthy:
            try:
                workers.reset()
            except Exception:
                workers.close(orderly=False)
            else:
                self._workers = workers
        else:
            workers.close(orderly=False)


def from_a_clean_state(fn: Callable[..., Any], *args: Any) -> Any:
    """What an earlier test may have changed and a later one must not see."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_grad_enabled(True)
    return fn(*args)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if {"pool2", "pool4"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.ranks)


@pytest.fixture(scope="session")
def pool2() -> Iterator[Pool]:
    """Two ranks."""
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def pool4() -> Iterator[Pool]:
    """Four ranks."""
    pool = Pool(4)
    yield pool
    pool.close()
