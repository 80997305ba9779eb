"""A checkpoint that a thread may still be writing; there is one at a time. Imports nothing of torch's checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

Explained = Callable[[], AbstractContextManager[None]]
"""While open, errors of torch's checkpoints are ours."""


class PendingCheckpoint:
    """A checkpoint that is being written, or has been."""

    def __init__(self, path: Path, written: Future[Any] | None, explained: Explained) -> None:
        """`written`: what ends when it is in its place; None if it is. `explained` is opened to wait for that."""
        self.path = path
        self._written, self._explained = written, explained
        if written is not None:
            _pending[:] = [self]

    def done(self) -> bool:
        """Whether it has ended on this rank, well or not. Never waits."""
        return self._written is None or self._written.done()

    def result(self, timeout_s: float | None = None) -> Path:
        """The folder, once the whole checkpoint is in it.

        Args:
            timeout_s: how long to wait, in seconds; None: as long as it takes.

        Raises:
            CheckpointError: it could not be written. The checkpoint before it is untouched.
            RankMissingError: another rank died.
            TimeoutError: it is not there yet.
        """
        if self._written is None:
            return self.path
        with self._explained():
            try:
                self._written.result(timeout_s)
            except FutureTimeout:
                if not self._written.done():
                    raise TimeoutError(f"{self.path} is not written after {timeout_s:g} s.") from None
                raise
            finally:
                if self._written.done():
                    _pending[:] = [one for one in _pending if one is not self]
        return self.path


_pending: list[PendingCheckpoint] = []
"""At most one: the last that was begun and whose end nobody has asked for."""


def finish_pending() -> None:
    """Waits for a checkpoint that is still being written, and raises what went wrong with it."""
    while _pending:
        _pending[0].result()
