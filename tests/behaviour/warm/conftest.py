"""A cache of its own for each test of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.caches import empty_cache
from wholestep.api.cache import artifact


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the test's own, switched on."""
    monkeypatch.setenv("WHOLESTEP_CACHE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(empty_cache(tmp_path / "cache")))
    return artifact.folder()
