"""The conformance suite: with ``--record FILE`` it writes down what became of every row."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.record import Recorder


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", metavar="FILE", type=Path, help="write the outcome of each test with a row to FILE")


def pytest_configure(config: pytest.Config) -> None:
    if file := config.getoption("--record"):
        if config.getoption("numprocesses", None):
            raise pytest.UsageError("--record writes what one process has seen: leave out -n, or give -n0.")
        config.pluginmanager.register(Recorder(file))
