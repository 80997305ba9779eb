"""Ranks that are killed while they save leave the last whole checkpoint. 30 kills: benchmarks/checkpoint_kills."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.checkpoint_kills.killing import kills
from tests.harness import fork_server

pytestmark = pytest.mark.ranks


def test_the_last_whole_checkpoint_is_there(tmp_path: Path) -> None:
    with fork_server.instead_of_spawning():
        found = list(kills(tmp_path, 4, seed=7))
    assert [kill for kill in found if not kill.is_good] == []
    assert all(later.told > earlier.told for earlier, later in pairwise(found))
