"""What a rank that ends by a signal leaves behind: the stacks of all its threads, told with the error of the test.

The stacks of Python go to a file, and from there to a note on the error; those of C++, and what the C library says,
go to the rank's standard error output, which pytest shows for the test.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path
from typing import TextIO

import torch

_open: dict[str, TextIO] = {}
"""Files that `faulthandler` writes to, by folder: it knows only their numbers, so they stay open."""


def report_crashes(folder: str, rank: int) -> None:
    """In a rank: from now on a signal that ends this process leaves a report in `folder`."""
    if folder in _open:
        return
    handler = signal.getsignal(signal.SIGINT)
    torch._C._set_print_stack_traces_on_fatal_signal(True)
    signal.signal(signal.SIGINT, handler)  # torch counts it among those that are fatal
    _open[folder] = (Path(folder) / f"rank {rank}, process {os.getpid()}").open("w", encoding="utf-8")
    faulthandler.enable(_open[folder], all_threads=True)


def crash_reports(folder: str) -> list[str]:
    """A text for each process that has left a report."""
    found = ((path.name, path.read_text(encoding="utf-8").strip()) for path in sorted(Path(folder).iterdir()))
    return [f"{name[0].upper()}{name[1:]}: {text}" for name, text in found if text]
