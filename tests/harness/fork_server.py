"""Ranks forked by a process that has imported torch: milliseconds each, where a new interpreter takes seconds.

What `multiprocessing` calls a fork server: one process that only imports, so it has neither threads nor process groups
nor CUDA when it forks. `wholestep.run` spawns its ranks instead; the programs in tests/ranks/test_world.py do so.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.context import ForkServerContext, ForkServerProcess
from unittest.mock import patch

import pytest  # noqa: F401

import tests.behaviour.cases  # noqa: F401  what most ranks run
import wholestep.lower.inductor.compile_fx
import wholestep.lower.inductor.segment_compiler  # noqa: F401
from wholestep.capture.native import build

build.wait()  # loaded, or why not: no thread that builds it is left when ranks are forked
gc.freeze()  # what all ranks share is not looked through, and so not copied, in each of them


class ForkedRank(ForkServerProcess):
    """A process with the environment that it was started in, and not the server's; it ends as a spawned one does."""

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        try:
            super().run()
        finally:
            atexit._run_exitfuncs()  # a forked process leaves them out: ranks say goodbye there


class Forks(ForkServerContext):
    """Stands in for the context of spawned processes."""

    Process = ForkedRank


def instead_of_spawning() -> AbstractContextManager[object]:
    """Around the start of ranks that need no CUDA: they are forked by a server that imports this module."""
    if sys.platform != "linux":
        return nullcontext()
    forks = Forks()
    forks.set_forkserver_preload([__name__])
    usual = multiprocessing.get_context
    return patch.object(multiprocessing, "get_context", lambda way=None: forks if way == "spawn" else usual(way))
