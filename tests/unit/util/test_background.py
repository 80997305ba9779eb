"""Threads beside other work: what fails there is not told, and a program that ends waits for what is in C++."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest

from wholestep.util import background


def test_what_fails_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    thread = background.start_in_background(lambda: 1 / 0)
    thread.join()
    assert thread.daemon, "the wait for it has an end"
    assert errors == []


def test_a_program_that_ends_waits_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_ending", threading.Event())
    may_end = threading.Event()
    done = []

    def work() -> None:
        may_end.wait(30)
        done.append(background.is_ending())

    assert not background.is_ending()
    short = background.start_in_background(work)
    threading.Timer(0.05, may_end.set).start()
    background._wait()
    assert done == [True]
    assert not short.is_alive()
    may_end.clear()
    monkeypatch.setattr(background, "END_WAIT_S", 0.05)
    long = background.start_in_background(work)
    background._wait()
    assert long.is_alive()
    may_end.set()
    long.join()


SCRIPT = """
import datetime, sys, time
import torch.distributed as dist
from wholestep.util import background

class Lasts:
    def __del__(self):  # the interpreter is being torn down, and the thread comes back
        time.sleep(3)

sys.lasts, store = Lasts(), dist.HashStore()
background.start_in_background(lambda: store.wait(["never"], datetime.timedelta(seconds=1)))
time.sleep(0.2)  # for it to be in C++
sys.exit(3)
"""


def test_a_thread_in_cpp_does_not_abort_a_program_that_ends() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 3, done.stderr
