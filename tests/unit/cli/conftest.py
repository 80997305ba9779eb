"""What tests of commands share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness import fork_server


@pytest.fixture(autouse=True)
def ranks_start_quickly() -> Iterator[None]:
    """A command in this process, which starts ranks, starts them as a pool does."""
    with fork_server.instead_of_spawning():
        yield
