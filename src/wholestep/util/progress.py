"""A spinner with the stage of a call that compiles, on the terminal of rank 0 only.

It goes away when the call is compiled. Output of the user's own is not redirected.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner

_shown: list[tuple[str, Spinner]] = []
"""The spinner on the terminal and whose it is; at most one."""


@contextmanager
def progress_shown(what: str, rank: int, console: Console | None = None) -> Iterator[None]:
    """Shows the stages told inside, after the name `what`, on `console` (standard error if None)."""
    console = console or Console(stderr=True)
    if rank != 0 or not console.is_terminal or _shown:
        yield
        return
    spinner = Spinner("dots", text=what)
    with Live(
        spinner, console=console, transient=True, refresh_per_second=8, redirect_stdout=False, redirect_stderr=False
    ):
        _shown.append((what, spinner))
        try:
            yield
        finally:
            _shown.clear()


def report_stage(stage: str) -> None:
    """Says what is being done now, where a spinner is shown."""
    for what, spinner in _shown:
        spinner.update(text=f"{what}: {stage}")
