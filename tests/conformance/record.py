"""What became of the rows of the conformance suite, as pytest saw it, in a JSON file.

    {"torch": "2.13.0", "device": "CPU", "tests": [
        {"test": "tests/conformance/runtime/test_groups.py::test_x[gloo]", "row": ["S9", "x"], "ranks": 2, "gpu": false,
         "outcome": "passed", "reason": ""}, ...]}

`outcome` is passed, failed, skipped or "not run": the test was only collected, or is for GPUs and was left out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.rank_pools import FIXTURES


class Recorder:
    """A pytest plugin that writes `file` when the session ends."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._entries: dict[str, list[dict[str, Any]]] = {}

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self._entries |= {item.nodeid: entries_of(item) for item in items if item.get_closest_marker("gpu")}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._entries |= {item.nodeid: entries_of(item) for item in session.items}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for entry in self._entries[report.nodeid]:
            if report.failed:
                entry |= {"outcome": "failed", "reason": _last_line(report)}
            elif report.skipped:
                entry |= {"outcome": "skipped", "reason": _last_line(report)}
            elif report.when == "call" and entry["outcome"] == "not run":
                entry["outcome"] = "passed"

    def pytest_sessionfinish(self) -> None:
        tests = [entry for entries in self._entries.values() for entry in entries]
        record = {"torch": torch.__version__.partition("+")[0], "device": _device(), "tests": tests}
        self.file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def entries_of(item: pytest.Item) -> list[dict[str, Any]]:
    """One entry for each row that a test stands for, not run yet."""
    pools = FIXTURES.keys() & set(getattr(item, "fixturenames", ()))
    return [
        {
            "test": item.nodeid,
            "row": list(mark.args),
            # Tests that start processes themselves say how many.
            "ranks": mark.kwargs.get("ranks", max((FIXTURES[name] for name in pools), default=1)),
            "gpu": item.get_closest_marker("gpu") is not None,
            "outcome": "not run",
            "reason": "",
        }
        for mark in item.iter_markers("row")
    ]


def _last_line(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):  # of a skip: file, line, reason
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    return (text.strip().splitlines() or [""])[0]


def _device() -> str:
    if not torch.cuda.is_available():
        return "CPU"
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
