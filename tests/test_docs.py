"""Documents are short, in their form, and name files that exist."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.test_architecture import ROOMS, ROOT, SRC, tracked_files
from wholestep import config

DOCS = ROOT / "docs"
MAX_COLUMNS = 120
MAX_README_LINES = 120
MAX_DECISION_LINES, MAX_DECISION_COLUMNS = 20, 100
MAX_TERMS = 40
DECISION_FIELDS = ("Context", "Decision", "Alternatives", "Evidence")

PAGES = sorted(path for path in tracked_files() if path.suffix == ".md")
DECISIONS = [path for path in PAGES if path.parent == DOCS / "decisions" and path.name != "README.md"]
FOLDERS = {path.name for root in (ROOT, SRC) for path in root.iterdir() if path.is_dir()}
"""What the path of a file of ours begins with."""


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def too_long(text: str, columns: int) -> list[str]:
    return [
        f"line {number}: {len(line)} columns" for number, line in enumerate(text.splitlines(), 1) if len(line) > columns
    ]


def named_files(text: str) -> set[str]:
    """Paths of ours that stand in backticks or in a block of code, without the name of a test after them."""
    spans = re.findall(r"```.*?```|`[^`\n]+(?:\n[^`\n]+)?`", text, re.DOTALL)
    words = {word.partition("::")[0].strip("`,;.") for span in spans for word in span.split()}
    return {word for word in words if re.fullmatch(r"[\w.-]+(?:/[\w.-]*)+", word) and word.partition("/")[0] in FOLDERS}


def missing(names: set[str]) -> list[str]:
    return sorted(name for name in names if not any((root / name).exists() for root in (ROOT, SRC)))


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_lines_are_short(path: Path) -> None:
    assert too_long(path.read_text(encoding="utf-8"), MAX_COLUMNS) == []


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_files_that_are_named_exist(path: Path) -> None:
    assert missing(named_files(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_links_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8"))
    assert [one for one in targets if "://" not in one and not (path.parent / one).exists()] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= MAX_README_LINES


@pytest.mark.parametrize("path", DECISIONS, ids=named)
def test_a_decision_has_its_form(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_DECISION_LINES
    assert too_long(text, MAX_DECISION_COLUMNS) == []
    assert text.startswith(f"# {path.name[:3]} ")
    assert re.findall(r"^- \*\*(\w+)\.\*\*", text, re.MULTILINE) == [*DECISION_FIELDS]


def test_decisions_are_numbered_and_listed() -> None:
    assert [path.name[:3] for path in DECISIONS] == [f"{number:03}" for number in range(1, len(DECISIONS) + 1)]
    listed = re.findall(r"\((\d{3}-[\w-]+\.md)\)", (DOCS / "decisions" / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == [path.name for path in DECISIONS]  # they stand by subject


def test_the_glossary_is_short() -> None:
    terms = [line for line in (DOCS / "glossary.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert len(terms) - 1 <= MAX_TERMS  # the first is the head of the table


def test_the_rooms_of_the_architecture_page_are_those_of_the_rule() -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("## Rooms")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    listed = [room for row in rows for room in re.findall(r"`([\w/]+)`", row)]
    assert listed == [room for room in ROOMS if (SRC / room).is_dir()]


def test_the_table_of_options_is_that_of_the_strategies() -> None:
    strategies = (config.DDP, config.ZeRO, config.FSDP)
    given = {name: [one.__name__ for one in strategies if name in fields_of(one)] for name in all_options(strategies)}
    page = (DOCS / "strategies.md").read_text(encoding="utf-8").partition("\n## Options\n")[2].partition("\n## ")[0]
    lines = [line for line in page.splitlines() if line.startswith("| `")]
    rows = [[cell.strip().strip("`") for cell in line.split("|")[1:4]] for line in lines]
    assert rows == [
        [name, default.replace("'", '"'), "all" if len(given[name]) == len(strategies) else ", ".join(given[name])]
        for name, default in all_options(strategies).items()
    ]


def fields_of(record: type) -> dict[str, str]:
    """The options of a frozen record, with the text of their defaults."""
    return {one.name: repr(one.default) for one in dataclasses.fields(record)}


def all_options(records: Iterable[type]) -> dict[str, str]:
    """Those of several records, each once."""
    return {name: default for record in records for name, default in fields_of(record).items()}


def test_a_fault_in_a_document_is_found() -> None:
    assert too_long("x" * 121, MAX_COLUMNS) == ["line 1: 121 columns"]
    text = "`tests/gone.py::test_it`, `passes/gone/` and `ir/program.py`, not `a/b.py`\n```\nbenchmarks/gone.py\n```"
    assert missing(named_files(text)) == ["benchmarks/gone.py", "passes/gone/", "tests/gone.py"]
