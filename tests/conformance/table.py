"""The conformance suite, row by row: what passes on CPU processes, what passes on GPUs, or why not.

    python -m tests.conformance.table                 run the tests that need no GPU, print the table
    python -m tests.conformance.table --markdown      ... and write docs/conformance.md
    python -m tests.conformance.table --json          ... as data
    python -m tests.conformance.table --from FILE     read outcomes that `pytest tests/conformance --record FILE` wrote

Outcomes on GPUs are read from docs/conformance_gpu.json, which a machine with GPUs writes:

    pytest tests/conformance -m gpu --record docs/conformance_gpu.json

Exit status 1 if a test failed or a row has none.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import textwrap
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.conformance.rows import ROWS, TITLES, Row

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "conformance.md"
GPU_RECORD = ROOT / "docs" / "conformance_gpu.json"
CPU_COLUMNS = {1: "1 process", 2: "gloo, 2", 4: "gloo, 4", 8: "gloo, 8"}
MAX_REASON = 160
MAX_COLUMNS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What became of one row."""

    group: str
    name: str
    meaning: str
    cells: dict[str, str]
    """Column -> ``passes``, ``FAILS``, ``skipped``, ``not run`` or the empty string where no test is."""
    remarks: list[str]
    """Why a cell is not ``passes``, and why there is no test on GPUs."""

    @property
    def passes(self) -> bool:
        """Whether a test of the row passed and none failed."""
        text = " ".join(self.cells.values())
        return "passes" in text and "FAILS" not in text


def lines(cpu: dict[str, Any], gpu: dict[str, Any] | None) -> list[Line]:
    """One line per row, from the records of two runs of pytest. What the first left out is looked up in the second."""
    outcomes = {(test["test"], *test["row"]): test for test in (gpu["tests"] if gpu is not None else [])}
    by_row: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for test in cpu["tests"]:
        if test["gpu"] and test["outcome"] == "not run":
            test = outcomes.get((test["test"], *test["row"]), test)
        by_row[tuple(test["row"])].append(test)
    return [_line(row, by_row[row.group, row.name]) for row in ROWS]


def _line(row: Row, tests: list[dict[str, Any]]) -> Line:
    on_cpu = [test for test in tests if not test["gpu"]]
    on_gpu = [test for test in tests if test["gpu"]]
    cells = {name: _cell([test for test in on_cpu if test["ranks"] == n]) for n, name in CPU_COLUMNS.items()}
    sizes = sorted({test["ranks"] for test in on_gpu})
    cells["GPU"] = ", ".join(f"{_cell([t for t in on_gpu if t['ranks'] == size])} ({size})" for size in sizes)
    remarks = list(dict.fromkeys(_short(test["reason"]) for test in tests if test["reason"]))
    if not on_gpu:
        remarks.append(f"no GPU test: {row.no_gpu}" if row.no_gpu else "no GPU test")
    return Line(group=row.group, name=row.name, meaning=row.meaning, cells=cells, remarks=remarks)


def _cell(tests: list[dict[str, Any]]) -> str:
    """The worst outcome counts."""
    outcomes = {test["outcome"] for test in tests}
    words = {"failed": "FAILS", "not run": "not run", "skipped": "skipped", "passed": "passes"}
    return next((word for outcome, word in words.items() if outcome in outcomes), "")


def _short(reason: str) -> str:
    text = " ".join(reason.split()).replace("|", "\\|")
    return text if len(text) <= MAX_REASON else text[:MAX_REASON] + "..."


def document(found: list[Line], cpu: dict[str, Any], gpu: dict[str, Any] | None) -> str:
    """docs/conformance.md."""
    on_gpu = f"GPU: torch {gpu['torch']}, {gpu['device']}, NCCL." if gpu is not None else "GPU: no record."
    passing = sum(line.passes for line in found)
    waiting = sum("not run" in line.cells["GPU"] for line in found)
    text = [
        "# Conformance",
        "",
        "Written by a command; do not edit:",
        "",
        "```",
        "python -m tests.conformance.table --markdown",
        "```",
        "",
        textwrap.fill(
            f"{passing} of {len(found)} rows pass: tests of each have run, and none of them failed. {waiting} rows "
            f"have tests on GPUs that have not been run yet.",
            MAX_COLUMNS,
        ),
        "",
        f"CPU: torch {cpu['torch']}, gloo. {on_gpu}",
        "",
        "Each row says with how many processes, on gloo or on how many GPUs, it was tested.",
        "",
        "- `passes`: every test of the row passed in that way. What is not named has no test.",
        "- `FAILS`, `skipped`: at least one test did, and the remark says why.",
        "- `not run`: there is such a test, and `docs/conformance_gpu.json` has no outcome of it yet.",
        "- The rows are described in `tests/conformance/rows.py`; a test names its row with `@pytest.mark.row`.",
    ]
    for group, title in TITLES.items():
        text += ["", f"## {group}: {title}", ""]
        for line in (line for line in found if line.group == group):
            text += [_wrapped(f"- `{line.name}`: {line.meaning}"), _wrapped(f"  - {_ways(line)}")]
    return "\n".join(text) + "\n"


def _wrapped(item: str) -> str:
    """An item of a list, in lines that are no longer than those of other documents."""
    indent = " " * (item.index("- ") + 2)
    return textwrap.fill(item, MAX_COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _ways(line: Line) -> str:
    """The ways in which a row was tested, by what came of them, and the remarks."""
    ways: dict[str, list[str]] = defaultdict(list)
    for column in CPU_COLUMNS.values():
        ways[line.cells[column]].append(column.replace(",", ""))
    for cell in line.cells["GPU"].split(", "):
        word, _, size = cell.rpartition(" (")
        ways[word].append(f"GPU {size.rstrip(')')}")
    came = [f"{word}: {', '.join(columns)}" for word, columns in ways.items() if word]
    return "; ".join([*came, *line.remarks])


def run_tests() -> dict[str, Any]:
    """Runs the tests that need no GPU and returns their record. Their output goes to stderr."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "record.json"
        command = [sys.executable, "-m", "pytest", "tests/conformance", "-m", "not gpu", "-q", "--record", str(file)]
        ended = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False)
        if ended.returncode not in (0, 1) or not file.is_file():
            raise SystemExit(f"pytest ended with status {ended.returncode} before the tests had run; see its output.")
        return read(file)


def read(file: Path) -> dict[str, Any]:
    """A record that pytest has written."""
    record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return record


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true", help="write docs/conformance.md instead of printing")
    parser.add_argument("--json", action="store_true", help="print data, not markdown")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="outcomes on the CPU; runs no test")
    options = parser.parse_args()
    cpu = read(options.source) if options.source else run_tests()
    gpu = read(GPU_RECORD) if GPU_RECORD.is_file() else None
    found = lines(cpu, gpu)
    if options.json:
        print(json.dumps([{**asdict(line), "passes": line.passes} for line in found], indent=1))
    elif options.markdown:
        DOCUMENT.write_text(document(found, cpu, gpu), encoding="utf-8")
    else:
        print(document(found, cpu, gpu), end="")
    return 0 if all(line.passes for line in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
