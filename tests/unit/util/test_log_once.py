"""log_once: one line in the log, however often it is asked for."""

from __future__ import annotations

import logging

import pytest

from wholestep.util.log_once import log_once


def test_a_text_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="wholestep"):
        for text in ("100%", "100%", "another"):
            log_once(logging.INFO, text)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "100%"), ("INFO", "another")
    ]  # fmt: skip
