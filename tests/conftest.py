"""Defaults of every test: one thread per process, because the ranks of a test share the cores; caches of its own."""

import os

# Before torch is imported by any test: OpenMP reads it once. Spawned ranks inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import gc
import logging
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, settings

from tests.harness.caches import empty_cache
from wholestep.api.compiled_step import CompiledStep

pytest_plugins = ["tests.harness.rank_pools"]

# How long an example takes says how busy the machine is.
settings.register_profile("wholestep", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("wholestep")


def pytest_configure(config: pytest.Config) -> None:
    """Gives the session empty caches: a calibration changes plans, kernels that are there are not compiled. The native
    look is kept."""
    # pytest listens to loggers that do not propagate. To this one torch tells stacks, once anybody listens.
    logging.getLogger("torch.__trace").propagate = True
    if hasattr(config, "workerinput"):
        return  # a worker inherits those of the process that started it: what one has compiled, all have
    cache = tempfile.TemporaryDirectory(prefix="wholestep-tests-")
    config.add_cleanup(cache.cleanup)
    os.environ["XDG_CACHE_HOME"] = str(empty_cache(Path(cache.name) / "cache"))  # ranks inherit it
    os.environ["WHOLESTEP_CACHE"] = "0"  # a test that captures shall capture
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(cache.name) / "inductor")


_collected: set[str] = set()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Notes all tests of the files that were asked for, before some are left out by name or mark."""
    _collected.update(item.nodeid for item in items)


@pytest.fixture
def collected(request: pytest.FixtureRequest) -> set[str]:
    """Ids of all tests of the files that pytest was asked for; none where it was asked for single tests."""
    return set() if any("::" in one for one in request.config.args) else _collected


def pytest_collection_finish() -> None:
    """What is imported stays: the garbage collector need not look at it again and again."""
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """Ends a group that a file of tests, or a helper of it, has started in this process."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def modules_of_a_test_leave_with_it() -> Iterator[None]:
    """No step is saved in a process that has a module whose file was written while it ran."""
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        path = getattr(sys.modules[name], "__file__", None)
        if not name.startswith("torch.") and path is not None and Path(tempfile.gettempdir()) in Path(path).parents:
            del sys.modules[name]


@pytest.fixture
def may_go_live() -> bool:
    """Whether steps that a test compiles may go live: not unless the test, its file or its folder says so.

    Most tests compare a graph with eager code, and would go on doing so in vain once the step was none.
    """
    return False


@pytest.fixture(autouse=True)
def level_of_the_log() -> Iterator[None]:
    """Commands turn the log down; a later test may read what it says."""
    logger = logging.getLogger("wholestep")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def no_step_goes_live_unseen(may_go_live: bool, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test of graphs, in this process, one of whose steps has been refused as one graph and went live."""
    refusals: list[str] = []
    go_live = CompiledStep._go_live

    def noted(step: CompiledStep, refusal: Exception, *call: Any) -> Any:
        refusals.append(str(refusal))
        return go_live(step, refusal, *call)  # type: ignore[arg-type]

    monkeypatch.setattr(CompiledStep, "_go_live", noted)
    yield
    if refusals and not may_go_live:
        pytest.fail(
            "A step of this test is no graph and went live. If it shall be refused compile it with fullgraph=True; if "
            f"it shall be live let the test ask for `may_go_live` as True. Refused was:\n{refusals[0]}"
        )


@pytest.fixture
def may_run_one_by_one() -> bool:
    """Whether Inductor may fail at a segment of a test, so that its calls run one by one. Else that is a fault of
    ours: what torch.compile compiles is compiled."""
    return False


@pytest.fixture(autouse=True)
def no_segment_runs_one_by_one_unseen(may_run_one_by_one: bool) -> Iterator[None]:
    """Fails a test, in this process, one of whose segments Inductor could not compile, for whatever sizes."""
    told, handler = list[str](), logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("wholestep").addHandler(handler)
    yield
    logging.getLogger("wholestep").removeHandler(handler)
    failed = [one for one in told if "could not be compiled, its calls run one by one" in one]
    if failed and not may_run_one_by_one:
        pytest.fail(f"Let the test ask for `may_run_one_by_one` as True if that shall be so: {failed[0]}")
