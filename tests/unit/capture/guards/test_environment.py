"""Which variables of the environment a trace depends on."""

from __future__ import annotations

import gc
import itertools
import os
import sys
import types

import pytest

from wholestep.capture.guards.environment import UNSET, Environment, environment_read


def test_variables_that_were_read_are_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_USER", "1")
    monkeypatch.delenv("NOT_THERE", raising=False)
    with environment_read() as read:
        assert os.environ.get("OF_THE_USER") == "1"
        assert os.environ.get("NOT_THERE") is None
    assert read == {"OF_THE_USER": "1", "NOT_THERE": UNSET}


@pytest.mark.parametrize("name", ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"])
def test_where_compilers_keep_what_they_made_does_not_count(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch sets them itself, so that they differ within a process."""
    monkeypatch.setenv(name, "somewhere")
    with environment_read() as read:
        assert os.environ[name] == "somewhere"
    assert read == {}


def test_another_thread_may_import_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    numbers = itertools.count()

    def imports(phase: str, info: dict[str, int]) -> None:
        sys.modules[f"imported_meanwhile_{next(numbers)}"] = types.ModuleType("one")

    often = gc.get_threshold()
    gc.callbacks.append(imports)
    gc.set_threshold(1)
    try:
        seen = Environment.seen({})
    finally:
        gc.set_threshold(*often)
        gc.callbacks.remove(imports)
    assert next(numbers) > 0
    assert __file__ in seen.files
