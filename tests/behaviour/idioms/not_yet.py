"""Idioms that fail: name -> what was seen. A test that passes in spite of its line here is red; the aim is three empty
tables, and then no file."""

from __future__ import annotations

NOT_YET_ON_ONE_PROCESS: dict[str, str] = {}

NOT_YET_ON_INDUCTOR: dict[str, str] = {}

NOT_YET_ON_TWO_RANKS: dict[str, str] = {
    "next_batch_inside": "wrong: the state of Python's random differs behind call 0",
}
