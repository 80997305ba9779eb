"""Pools of worker processes, so that a test on several ranks costs milliseconds and not the import of torch.

    def check(scale):                       # at the top level of the test module
        world = wholestep.runtime.distributed.world.init()  # world.device: the CPU under gloo, this rank's GPU under
        NCCL ... return plain_data_or_tensors

    def test_on_the_cpu(pool2):             # also pool4 and pool8: gloo
        first, second = pool2.run(check, 3.0)

    @pytest.mark.gpu
    def test_on_gpus(nccl2):                # also nccl4: one GPU per process
        nccl2.run(check, 3.0)

    def test_on_both(ranks2):               # also ranks4: runs as [gloo] and, marked gpu, as [nccl]
        ranks2.run(check, 3.0)

An error on a rank is raised in the test with its own class. Expect it there, or (quicker, as the pool then needs no
repair) with `pytest.raises` inside of the function. A rank that a signal ends leaves the stacks of its threads in a
note on the error.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.harness import fork_server, shared_gpu
from tests.harness.crash_reports import crash_reports, report_crashes
from wholestep.runtime.distributed.launch import Workers
from wholestep.runtime.distributed.world import close_current, enter

COLLECTIVE_TIMEOUT_S = 200.0
"""Longer than rank 0 compiles anything on a machine that is busy with other tests: the headers of torch, for the first
kernel of an Inductor whose cache is empty, have taken two minutes."""

FIXTURES = {"pool2": 2, "pool4": 4, "pool8": 8, "nccl2": 2, "nccl4": 4, "ranks2": 2, "ranks4": 4}
"""Name of a fixture that gives a pool -> how many ranks it has."""


class Pool:
    """Workers that are started when first used, and made anew after a failure that may have left traces."""

    def __init__(self, nproc: int, backend: str = "gloo") -> None:
        self.nproc = nproc
        self.backend = backend
        # What the test that happens to be the first sets for itself is not for those after it.
        self._environment = dict(os.environ)
        self._workers: Workers | None = None
        self._reports = tempfile.TemporaryDirectory(prefix="wholestep-crashes-")

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout_s: float = COLLECTIVE_TIMEOUT_S + 20, grace_s: float = 5.0
    ) -> list[Any]:
        """``fn(*args)`` on every rank; the results in rank order. Errors as in
        `wholestep.runtime.distributed.world.run`."""
        self.begin()
        assert self._workers is not None
        try:
            task = functools.partial(from_a_clean_state, fn)
            return self._workers.call(task, args, timeout_s=timeout_s, grace_s=grace_s)
        except BaseException as error:
            for report in crash_reports(self._reports.name):
                error.add_note(report)
            self._repair()
            raise

    def begin(self) -> None:
        """Starts the workers if there are none: before a test that looks at the clock, as they import torch first."""
        if self._workers is None:
            self._workers = self._start()

    def renew(self) -> None:
        """New process groups, for tests to which it matters how many groups a rank has made before."""
        if self._workers is not None:
            self._workers.reset()

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close(orderly=self.backend != "gloo")  # eight processes that say goodbye take their time
            self._workers = None
        self._reports.cleanup()

    def _start(self) -> Workers:
        if self.backend == "nccl":
            needs_gpus(self.nproc)
        quickly = fork_server.instead_of_spawning() if self.backend == "gloo" else nullcontext()
        self._reports.cleanup()  # what is there was told with the error that it is about
        self._reports = tempfile.TemporaryDirectory(prefix="wholestep-crashes-")
        setup = functools.partial(begin_rank, self._reports.name, self.backend)
        with patch.dict(os.environ, self._environment, clear=True), quickly:
            return Workers(self.nproc, setup, close_current)

    def _repair(self) -> None:
        """New process groups when every rank has reported, else new processes at the next call."""
        workers, self._workers = self._workers, None
        assert workers is not None
        # An NCCL communicator with an unmatched collective cannot be left in order: its stream waits for ever.
        if workers.healthy and self.backend == "gloo":
            try:
                workers.reset()
            except Exception:
                workers.close(orderly=False)
            else:
                self._workers = workers
        else:
            workers.close(orderly=False)


def begin_rank(reports: str, backend: str) -> None:
    """The first that a worker does, and again when it gets new process groups."""
    report_crashes(reports, int(os.environ["RANK"]))
    enter(backend, COLLECTIVE_TIMEOUT_S)


def from_a_clean_state(fn: Callable[..., Any], *args: Any) -> Any:
    """What an earlier test may have changed and a later one must not see."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_grad_enabled(True)
    try:
        return fn(*args)
    except pytest.fail.Exception as error:  # such as an error that pytest.raises missed; it would end the process
        raise AssertionError(str(error)) from error


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FIXTURES.keys() & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.ranks)


def of_ranks(nproc: int, backend: str) -> Any:
    """A fixture for the session: `nproc` processes, with one GPU each under NCCL."""

    @pytest.fixture(scope="session", name=f"{'nccl' if backend == 'nccl' else 'pool'}{nproc}")
    def pool() -> Iterator[Pool]:
        made = Pool(nproc, backend)
        yield made
        made.close()

    return pool


def on_both(nproc: int) -> Any:
    """A fixture: `nproc` ranks, on CPUs and on GPUs."""

    @pytest.fixture(params=["gloo", pytest.param("nccl", marks=pytest.mark.gpu)], name=f"ranks{nproc}")
    def ranks(request: pytest.FixtureRequest) -> Pool:
        return request.getfixturevalue(f"{'pool' if request.param == 'gloo' else 'nccl'}{nproc}")

    return ranks


pool2, pool4, pool8 = (of_ranks(nproc, "gloo") for nproc in (2, 4, 8))
nccl2, nccl4 = (of_ranks(nproc, "nccl") for nproc in (2, 4))
ranks2, ranks4 = on_both(2), on_both(4)


def needs_gpus(number: int) -> None:
    """Skips the test on a machine with fewer GPUs, and fails it on one without any."""
    count = shared_gpu.count()
    if count == 0:
        reason = 'This test needs GPUs and this machine shows none. Leave such tests out with -m "not gpu".'
        pytest.fail(reason, pytrace=False)
    if count < number:
        pytest.skip(f"needs {number} GPUs; this machine shows {count}")
