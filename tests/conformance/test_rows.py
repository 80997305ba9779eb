"""The list of rows, the record of a run, and the table: each row has a test, and no outcome is invented."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.conformance import table
from tests.conformance.rows import ROWS, TITLES

pytestmark = pytest.mark.filterwarnings("error")


def recorded(folder: Path, target: str, *options: str) -> dict[str, Any]:
    """What a run of pytest writes down."""
    file = folder / "record.json"
    command = [sys.executable, "-m", "pytest", target, "-q", "-p", "no:cacheprovider", "--record", str(file), *options]
    ended = subprocess.run(command, cwd=table.ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert file.is_file(), ended.stdout + ended.stderr
    return table.read(file)


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return recorded(tmp_path_factory.mktemp("collected"), "tests/conformance", "--collect-only")


def test_every_row_has_a_test(collected: dict[str, Any]) -> None:
    tested = {tuple(test["row"]) for test in collected["tests"]}
    assert [(row.group, row.name) for row in ROWS if (row.group, row.name) not in tested] == []


def test_every_test_stands_for_a_known_row(collected: dict[str, Any]) -> None:
    known = {(row.group, row.name) for row in ROWS}
    assert [test for test in collected["tests"] if tuple(test["row"]) not in known] == []


def test_rows_are_named_once_in_groups_that_have_a_title() -> None:
    names = [(row.group, row.name) for row in ROWS]
    assert len(set(names)) == len(names)
    assert {row.group for row in ROWS} == set(TITLES)
    assert all(row.meaning for row in ROWS)


SAMPLE = """
    import pytest
    row = pytest.mark.row

    @row("S8", "store_timeout")
    def test_passes(): pass

    @row("S8", "store_based_barrier")
    def test_fails(): assert 1 == 2, "one is not two"

    @row("S9", "collectives")
    @pytest.mark.skip(reason="not today")
    def test_skipped(): pass

    @row("S9", "bool_tensors", ranks=4)
    def test_four(): pass

    @pytest.fixture
    def broken(): raise OSError("no such thing")

    @row("S10", "local_rank")
    @row("S10", "debug_level")
    def test_broken(broken): pass

    @row("S9", "bool_tensors")
    @pytest.mark.gpu
    def test_gpu(): pass

    @row("S9", "collectives", ranks=2)
    @pytest.mark.gpu
    def test_other_gpu(): pass

    def test_without_a_row(): pass
"""


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("sample")
    file = folder / "test_sample.py"
    file.write_text(textwrap.dedent(SAMPLE))
    options = ("-p", "tests.conformance.conftest", "-c", str(table.ROOT / "pyproject.toml"), "-m", "not gpu")
    return recorded(folder, str(file), *options)


def test_a_record_holds_what_pytest_saw(sample: dict[str, Any]) -> None:
    found = {
        (*test["row"], test["ranks"], test["gpu"]): (test["outcome"], test["reason"].partition("\n")[0])
        for test in sample["tests"]
    }
    assert found == {
        ("S8", "store_timeout", 1, False): ("passed", ""),
        ("S8", "store_based_barrier", 1, False): ("failed", "AssertionError: one is not two"),
        ("S9", "collectives", 1, False): ("skipped", "not today"),
        ("S9", "bool_tensors", 4, False): ("passed", ""),
        ("S10", "local_rank", 1, False): ("failed", "OSError: no such thing"),
        ("S10", "debug_level", 1, False): ("failed", "OSError: no such thing"),
        ("S9", "bool_tensors", 1, True): ("not run", ""),
        ("S9", "collectives", 2, True): ("not run", ""),
    }


def test_the_table_tells_failures_skips_and_missing_tests(sample: dict[str, Any]) -> None:
    on_gpu = [test | {"outcome": "passed"} for test in sample["tests"] if test["gpu"] and test["ranks"] == 1]
    lines = {(line.group, line.name): line for line in table.lines(sample, {"tests": on_gpu})}
    assert lines["S8", "store_timeout"].cells["1 process"] == "passes"
    assert lines["S8", "store_timeout"].passes
    assert lines["S8", "store_based_barrier"].cells["1 process"] == "FAILS"
    assert lines["S8", "store_based_barrier"].remarks[0] == "AssertionError: one is not two"
    assert not lines["S8", "store_based_barrier"].passes
    assert lines["S9", "collectives"].cells["1 process"] == "skipped"
    assert lines["S9", "collectives"].cells["GPU"] == "not run (2)"
    assert set(lines["S9", "collectives"].remarks) == {"not today"}
    assert lines["S9", "bool_tensors"].cells["gloo, 4"] == "passes"
    assert lines["S9", "bool_tensors"].cells["GPU"] == "passes (1)"
    assert not lines["S9", "all_to_all_single"].passes  # nothing ran for it
    text = table.document(list(lines.values()), sample, None)
    assert "  - FAILS: 1 process; AssertionError: one is not two" in text
    assert f"2 of {len(ROWS)} rows pass: tests of each have run, and none of them failed." in text
    assert "1 rows have tests on GPUs" in " ".join(text.split())


DOCUMENT = table.DOCUMENT.read_text(encoding="utf-8") if table.DOCUMENT.is_file() else ""


def test_the_document_has_every_row_and_each_passes() -> None:
    listed = DOCUMENT.partition("\n## ")[2].split("\n- `")[1:]
    assert [item.partition("`")[0] for item in listed] == [row.name for row in ROWS]
    assert [item for item in listed if "\n  - passes: " not in item] == []
    assert [item for item in listed if "FAILS" in item] == []


def test_the_record_of_gpus_is_of_this_suite(collected: dict[str, Any]) -> None:
    """Tests that the record names still exist, and none of them failed."""
    record = json.loads(table.GPU_RECORD.read_text(encoding="utf-8"))
    assert record["device"] != "CPU"
    existing = {test["test"] for test in collected["tests"] if test["gpu"]}
    assert [test["test"] for test in record["tests"] if test["test"] not in existing] == []
    assert [test["test"] for test in record["tests"] if test["outcome"] != "passed"] == []
