"""docs/idioms.md is what its command prints, and no idiom is refused or trains otherwise than eager code."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.idiom_table import INTRODUCTION, row, table
from benchmarks.idioms import GROUPS, IDIOMS
from benchmarks.idioms.compare import Outcome, outcome

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "idioms.md"
LINES = DOCUMENT.read_text(encoding="utf-8").splitlines()
ROWS = {line.split("|")[1].strip(): line for line in LINES if line.startswith("| ") and "---" not in line}

COMPUTED = ("batch_behind_getattr", "list_of_numbers", "print_behind_the_update", "dropout", "next_batch_inside")


@pytest.fixture
def may_go_live() -> bool:
    """Whether steps that a test compiles may go live: idioms do."""
    return True


@pytest.mark.parametrize("name", COMPUTED)
def test_a_row_is_what_the_command_prints(name: str) -> None:
    assert row(outcome(IDIOMS[name])) == ROWS[name]


def test_every_idiom_has_its_row_in_its_group() -> None:
    empty = {name: Outcome(name, "pure", 1, "") for name in IDIOMS}
    expected = [line.split("|")[1].strip() if line.startswith("| ") else line for line in table(empty)]
    printed = [line.split("|")[1].strip() if line.startswith("| ") else line for line in LINES]
    count = 2 + len(INTRODUCTION) + 1  # the line with numbers is another one
    assert printed[:count] == expected[:count]
    assert printed[count + 1 :] == expected[count + 1 :]
    assert {f"## {name}" for name in GROUPS} <= set(LINES)


def test_no_idiom_is_refused_or_differs() -> None:
    kinds = {name: line.split("|")[2].strip() for name, line in ROWS.items() if name != "idiom"}
    assert {name: kind for name, kind in kinds.items() if kind not in ("pure", "live")} == {}
    assert set(kinds) == set(IDIOMS)


def test_the_numbers_are_those_of_the_rows() -> None:
    kinds = [line.split("|")[2].strip() for name, line in ROWS.items() if name != "idiom"]
    (told,) = (line for line in LINES if line.startswith(f"{len(IDIOMS)} idioms, "))
    assert told.endswith(f": {kinds.count('pure')} pure, {kinds.count('live')} live.")
