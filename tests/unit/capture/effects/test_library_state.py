"""State to which only code of libraries leads: watched from the moment at which that code is entered."""

from __future__ import annotations

import contextvars
import gc
import logging
import math
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import wholestep as ws
from tests.unit.capture.steps import captured
from wholestep.capture.effects.c_functions import Kind, kind_of
from wholestep.capture.effects.library_state import Access, LibraryState, _there_before, accesses
from wholestep.capture.reach.reachable import Reachable
from wholestep.capture.tracing.call_watch import OutsideEffect
from wholestep.errors import CaptureError
from wholestep.util.gc_pause import gc_paused

LIBRARY = """
class Meter:
    def __init__(self):
        self.factor, self.calls, self.seen = 2.0, 0, []

    def scaled(self, x):
        return x * self.factor

    def counted(self, x):
        self.calls += 1
        return x * 2

    def noted(self, x):
        self.seen.append(1)
        return x * 2

    def settled(self, x):
        self.factor = 3.0
        return x * 2

_METERS = {}

def meter(name):
    return _METERS.setdefault(name, Meter())

def scaled(x):
    return meter("a").scaled(x)

def counted(x):
    return meter("a").counted(x)

def noted(x):
    return meter("a").noted(x)

def settled(x):
    return meter("a").settled(x)

def of_its_own(x):
    return Meter().counted(x)
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """An installed package whose functions keep objects that no name of the user's leads to."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "a_library_of_meters.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(folder))
    import a_library_of_meters  # type: ignore[import-not-found]

    a_library_of_meters.meter("a")
    yield a_library_of_meters
    sys.modules.pop("a_library_of_meters")


@pytest.mark.parametrize("name", ["counted", "noted"])
def test_what_a_library_changes_is_found(library: ModuleType, name: str) -> None:
    with pytest.raises(CaptureError, match="changes Python state"):
        captured(lambda x: getattr(library, name)(x), torch.ones(2))
    assert library.meter("a").calls == 0
    assert library.meter("a").seen == []


def test_what_a_library_makes_in_the_step_is_its_own(library: ModuleType) -> None:
    assert captured(lambda x: library.of_its_own(x), torch.ones(2)).program


@pytest.mark.parametrize("kind", [lambda: {"a": 1}, lambda: np.zeros(2), lambda: bytearray(2)])
def test_data_that_refers_to_nothing_is_as_old_as_what_holds_it(kind: Callable[[], Any]) -> None:
    """The collector knows no age of a dict of plain values: those of calls (``**kwargs``) are made in every one."""
    holder = [kind()]
    gc.collect()
    with gc_paused():
        state = LibraryState(Reachable())
        young = [kind()]
        state._alive.append(young[0])
        assert _there_before([holder[0], young[0]]) == {id(holder[0])}


def test_a_variable_that_only_c_holds_is_old() -> None:
    """numpy's error state is one: what the collector can see of its holders is made by the trace."""
    kept = contextvars.ContextVar("kept", default=1)
    gc.collect()
    with gc_paused():
        state = LibraryState(Reachable())
        state._alive.append(kept)
        assert not gc.is_tracked(kept)
        assert _there_before([kept]) == {id(kept)}


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize("name", ["scaled", "settled"])
def test_what_a_library_reads_and_sets_is_compared(library: ModuleType, name: str) -> None:
    def step(x: Tensor) -> Tensor:
        return getattr(library, name)(x)  # type: ignore[no-any-return]

    run, meter = ws.compile(step, backend="eager"), library.meter("a")
    meter.factor = 3.0
    first = run(torch.ones(2)).tolist()
    meter.factor = 5.0
    found = run(torch.ones(2)).tolist()
    assert (first, found, meter.factor) == {
        "scaled": ([3.0, 3.0], [5.0, 5.0], 5.0),
        "settled": ([2.0, 2.0], [2.0, 2.0], 3.0),
    }[name]


COMPRESSOR, VARIABLE = zlib.compressobj(), contextvars.ContextVar("VARIABLE", default=1)


@pytest.mark.parametrize(
    "does", [lambda: COMPRESSOR.flush(), lambda: sys.getswitchinterval(), lambda: torch.get_num_threads()]
)
def test_state_that_nobody_can_look_at_ends_a_trace(does: Callable[[], Any]) -> None:
    def step(x: Tensor) -> Tensor:
        does()
        return x * 2

    with pytest.raises(OutsideEffect):
        captured(step, torch.ones(2))


def test_functions_have_what_their_module_or_object_has() -> None:
    nothing = [len, torch.add, torch.is_grad_enabled, sys._getframe, dict.fromkeys]
    assert {kind_of(one) for one in nothing} == {Kind.NOTHING}
    assert kind_of([].append) is kind_of(COMPRESSOR.flush) is Kind.AN_OBJECT
    assert {kind_of(one) for one in (print, sys.setrecursionlimit, torch.set_num_threads)} == {Kind.MORE}


def test_accesses_of_a_function() -> None:
    found = accesses(logging.Logger.setLevel.__code__)
    assert Access(False, "self", (), "level", writes=True) in found
    assert Access(False, "self", ("manager",), "_clear_cache", writes=False) in found
    assert Access(True, "", (), "_checkLevel", writes=False) in found


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize(("module", "name"), [(torch, "relu"), (torch.nn.functional, "gelu"), (math, "sqrt")])
def test_a_function_of_a_library_may_be_exchanged(
    module: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: dict[str, Callable[[Tensor], Tensor]] = {
        "relu": lambda x: torch.relu(x),
        "gelu": lambda x: F.gelu(x),
        "sqrt": lambda x: x * math.sqrt(4.0),
    }
    run = ws.compile(steps[name], backend="eager")
    before = run(torch.ones(2)).tolist()
    monkeypatch.setattr(module, name, lambda x: x * 7.0)
    assert run(torch.ones(2)).tolist() == steps[name](torch.ones(2)).tolist() != before
    monkeypatch.undo()
    assert run(torch.ones(2)).tolist() == before
