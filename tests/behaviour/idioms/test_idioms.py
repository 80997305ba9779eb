"""Idioms of everyday training steps, ten calls each: compiled, they do what eager code does, on one process and on two.

The idioms and what compares them are in `benchmarks/idioms/`; `python -m benchmarks.idiom_table` prints the same
judgement.
"""

from __future__ import annotations

from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.idioms import GROUPS, IDIOMS, Loop
from benchmarks.idioms.compare import differences, outcome, play

SHOWN = 20
"""Complaints that a failure prints: one number that is wrong in the first call makes hundreds."""


PAGE = (Path(__file__).resolve().parents[3] / "docs" / "idioms.md").read_text(encoding="utf-8")
COLUMNS = {
    row[1].strip(): [one.strip() for one in row[2:4]]
    for row in map(methodcaller("split", "|"), PAGE.splitlines())
    if len(row) > 4
}
"""Of each idiom whether the page says pure or live, and in how many pieces."""


@pytest.mark.parametrize("name", IDIOMS)
def test_an_idiom_does_what_eager_code_does_and_runs_as_the_page_says(name: str) -> None:
    found = outcome(IDIOMS[name])
    assert not found.complaints, "\n".join(found.complaints[:SHOWN])
    if f"torch {torch.__version__.partition('+')[0]}:" in PAGE:  # another version may trace otherwise
        assert [found.kind, str(found.pieces)] == COLUMNS[name], found.reason


@pytest.mark.parametrize("name", [n for n, one in IDIOMS.items() if one.inductor])
def test_an_idiom_on_inductor_does_what_eager_code_does(name: str) -> None:
    """Up to rounding: Inductor adds up in an order of its own."""
    complaints = outcome(IDIOMS[name], backend="inductor").complaints
    assert not complaints, "\n".join(complaints[:SHOWN])


def average_gradients(loop: Loop) -> None:
    """Makes an eager loop train on all ranks, in the plainest way: every gradient is averaged as it comes."""

    def averaged(grad: Tensor) -> Tensor:
        mean = grad / dist.get_world_size()
        dist.all_reduce(mean)
        return mean

    modules = [one for one in loop.observe().values() if isinstance(one, nn.Module)]
    for param in {param for module in modules for param in module.parameters() if param.requires_grad}:
        param.register_hook(averaged)


def complaints_of_a_rank(name: str) -> tuple[str, ...]:
    idiom = IDIOMS[name]
    return outcome(idiom, begin=average_gradients, rank=dist.get_rank(), rounds=idiom.added_on_ranks).complaints


@pytest.mark.parametrize("name", [n for n, one in IDIOMS.items() if one.ranks])
def test_an_idiom_on_two_ranks_does_what_eager_code_does(pool2: Any, name: str) -> None:
    """Each rank with batches and random numbers of its own."""
    found = pool2.run(complaints_of_a_rank, name)
    told = [f"rank {rank}: {one}" for rank, ones in enumerate(found) for one in ones]
    assert not told, "\n".join(told[:SHOWN])


# An idiom shall test something.


@pytest.mark.parametrize("name", IDIOMS)
def test_eager_code_repeats_itself_and_moves_all_that_is_observed(name: str) -> None:
    first, again = (play(IDIOMS[name], lambda step: step) for _ in range(2))
    assert differences(first, again) == []
    begin = IDIOMS[name].build().observe()
    assert begin, "it shows nothing"
    for observed in begin:
        paths = [path for path in first[0] if path == observed or path.startswith(tuple(observed + c for c in ".[:"))]
        of_calls = [{path: seen[path] for path in seen if path in paths or path not in first[0]} for seen in first[:-1]]
        assert any(differences([one], [of_calls[0]]) for one in of_calls[1:]), f"{observed} never moves"


def test_an_idiom_says_in_a_line_what_it_shows() -> None:
    assert [name for name, one in IDIOMS.items() if not one.summary.endswith(".")] == []
    assert {one.group for one in IDIOMS.values()} == set(GROUPS)


def test_there_are_enough_and_each_group_runs_on_inductor_and_most_on_ranks() -> None:
    assert len(IDIOMS) >= 91
    assert {one.group for one in IDIOMS.values() if one.inductor} == set(GROUPS)
    assert len([one for one in IDIOMS.values() if one.ranks]) >= 12
