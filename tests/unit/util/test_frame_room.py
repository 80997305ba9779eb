"""Frames of what a function calls lie in one chunk: no call asks the system for memory."""

from __future__ import annotations

import resource
import sys

import pytest
import torch

import wholestep as ws
from wholestep.api.stages import Stages
from wholestep.util.frame_room import with_frame_room

CALLS, DEEPEST = 100, 150


def nothing() -> None:
    return None


nothing.__code__ = nothing.__code__.replace(co_stacksize=100)  # so that at some depth it does not fit any more


def most_faults(depth: int = 0) -> int:
    """How many pages `CALLS` calls of a function make the system bring, at the depth where they are most."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        nothing()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return faults if depth == DEEPEST else max(faults, most_faults(depth + 1))


@with_frame_room
def with_room() -> int:
    return most_faults()


def test_no_call_asks_for_memory():
    with_room()
    assert with_room() < CALLS // 4


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="later versions of Python may keep chunks")
def test_without_it_some_do():
    assert most_faults() >= CALLS


class Counted(Exception):
    """Ends a first call."""


@pytest.mark.parametrize("depth", [0, 40])
def test_a_first_call_has_it(monkeypatch: pytest.MonkeyPatch, depth: int):
    def build(*_: object, **__: object) -> None:
        raise Counted(most_faults())

    def deep(depth: int) -> None:
        step(torch.ones(2)) if depth == 0 else deep(depth - 1)

    step = ws.compile(lambda x: x + 1, backend="eager")
    monkeypatch.setattr(Stages, "build", build)
    for _ in range(2):
        with pytest.raises(Counted) as counted:
            deep(depth)
    assert counted.value.args[0] < CALLS // 4
