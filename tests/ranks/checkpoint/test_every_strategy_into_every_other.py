"""A checkpoint of any strategy and number of ranks loads into any other, bit for bit, without a capture more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.ranks.checkpoint.training import SETUPS, Training, differences, training, values

pytestmark = pytest.mark.ranks

CALLS = 2
Whole = dict[str, Tensor]

_live: dict[str, Training] = {}
"""In a rank: the trainings that have been saved, to load into between calls."""


def run(request: pytest.FixtureRequest, ranks: int, do: Any, *args: Any) -> list[Any]:
    """On so many ranks; a single one is this process, without a group."""
    return [do(*args)] if ranks == 1 else request.getfixturevalue(f"pool{ranks}").run(do, *args)


def saved(name: str, folder: Path) -> Whole:
    """Trains, saves, and gives what was saved. Every setup has other numbers."""
    number = [*SETUPS].index(name)
    one = _live[name] = training(SETUPS[name], seed=1 + number)
    one.run(CALLS)
    one.opt.param_groups[1]["lr"] = 0.01 + 1e-4 * number
    one.save(folder / name)
    return values(one)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[Path, list[Whole]]:
    """A checkpoint of each setup, and what is in it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, [run(request, setup.ranks, saved, name, folder)[0] for name, setup in SETUPS.items()]


def between_calls(name: str, folder: Path) -> tuple[list[Whole], list[int], int]:
    """What each checkpoint leaves in a training that has run, the calls it has by then, and its captures."""
    one = _live.pop(name)
    found, calls = [], []
    for source in SETUPS:
        one.run(1)
        one.load(folder / source)
        found.append(values(one))
        calls.append(one.step.calls)
    one.run(1)
    return found, calls, one.step.cache_info().traces


@pytest.mark.parametrize("name", SETUPS)
def test_between_calls(checkpoints: Any, request: pytest.FixtureRequest, name: str) -> None:
    folder, wanted = checkpoints
    for found, calls, traces in run(request, SETUPS[name].ranks, between_calls, name, folder):
        faults = {source: differences(*pair) for source, *pair in zip(SETUPS, wanted, found, strict=True)}
        assert {source: fault for source, fault in faults.items() if fault} == {}
        assert calls == [CALLS] * len(SETUPS)
        assert traces == 1


def at_first(name: str, source: Path) -> tuple[Whole, Whole, Whole, int]:
    """What a checkpoint leaves in a training that has not run; and the values after a call, and after another one
    from the same checkpoint."""
    one = training(SETUPS[name], seed=99)
    one.load(source)
    before, after = values(one), []
    for again in (False, True):
        if again:
            one.load(source)
        one.run(1, first=CALLS)
        after.append(values(one))
    return before, *after, one.step.cache_info().traces


@pytest.mark.parametrize("place", range(len(SETUPS)), ids=[*SETUPS])
def test_before_the_first_call(checkpoints: Any, request: pytest.FixtureRequest, place: int) -> None:
    folder, wanted = checkpoints
    names = [*SETUPS]
    source = (3 * place + 1) % len(names)  # each into one other
    for before, after, again, traces in run(
        request, SETUPS[names[place]].ranks, at_first, names[place], folder / names[source]
    ):
        assert differences(wanted[source], before) == []
        assert differences(after, again) == []
        assert differences(before, after) != []
        assert traces == 1
