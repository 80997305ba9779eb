"""Where another thread is: as Python tells it, and without harm to that thread."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from wholestep.util.thread_stack import frames_of

DEPTH = 12


def waits(depth: int, ready: threading.Event, over: threading.Event) -> None:
    if depth:
        waits(depth - 1, ready, over)
    else:
        ready.set()
        over.wait(60)


def in_a_thread(target: Any, *args: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, daemon=True)
    thread.start()
    return thread


def test_the_frames_of_another_thread_are_told_innermost_first() -> None:
    ready, over = threading.Event(), threading.Event()
    thread = in_a_thread(waits, 5, ready, over)
    ready.wait(10)
    for _ in range(2):
        lines = [line for file, line in frames_of(thread.ident or 0) if file == __file__]
        first = waits.__code__.co_firstlineno
        assert lines == [first + 5, *[first + 2] * 5]
    over.set()
    thread.join()
    assert frames_of(thread.ident or 0) == []


def test_the_collector_is_as_it_was() -> None:
    before, is_on = gc.get_threshold(), gc.isenabled()
    frames_of(threading.get_ident())
    assert (gc.get_threshold(), gc.isenabled()) == (before, is_on)


class Hop:
    """Garbage that calls a function when it is collected, and leaves the next such garbage while that returns True."""

    def __init__(self, hop: Callable[[], bool], kept: list[object]) -> None:
        self.hop, self.kept, self.itself = hop, kept, self

    def __del__(self) -> None:
        if self.hop():
            self.kept.extend(SimpleNamespace() for _ in range(8))
            Hop(self.hop, self.kept)


def narrow(depth: int, wait: Callable[[], None]) -> None:
    if depth:
        narrow(depth - 1, wait)
    else:
        wait()


def wide(depth: int, wait: Callable[[], None]) -> None:
    a = b = c = d = e = f = g = h = i = j = k = depth  # a frame that is larger
    if depth + (a == b == c == d == e == f == g == h == i == j == k) - 1:
        wide(depth - 1, wait)
    else:
        wait()


def named(frames: list[tuple[str, int]]) -> tuple[int, int]:
    """How many of the frames are of `narrow` and `wide`."""
    lines = [line for file, line in frames if file == __file__]
    codes = (narrow.__code__, wide.__code__)
    own = [{line for *_, line in code.co_lines() if line} for code in codes]
    return tuple(sum(line in one for line in lines) for one in own)  # type: ignore[return-value]


def stacks_of_a_thread_that_moves() -> set[tuple[int, int]]:
    """How many frames of two functions some stacks name, of a thread that leaves them whenever garbage is collected."""
    go, there = threading.Lock(), threading.Lock()
    go.acquire()
    there.acquire()
    over: list[bool] = []
    asker = threading.get_ident()

    def wait() -> None:
        there.release()
        go.acquire()

    def move() -> None:
        while not over:
            narrow(DEPTH, wait)
            wide(DEPTH, wait)

    def hop() -> bool:
        if over:  # collected later, in the middle of something else
            return False
        if threading.get_ident() == asker:  # others collect garbage too
            go.release()
            there.acquire()
        return True

    thread = in_a_thread(move)
    there.acquire()
    mover = thread.ident or 0
    before = gc.get_threshold()
    gc.set_threshold(1, 1000, 1000)
    Hop(hop, [])
    try:
        return {named(frames_of(mover)) for _ in range(20)}
    finally:
        gc.set_threshold(*before)
        over.append(True)
        go.release()
        thread.join(10)


def test_a_thread_that_moves_on_comes_to_no_harm(pool2: Any) -> None:
    """With ``sys._current_frames()`` and ``f_back`` on CPython 3.11 the process ended by SIGSEGV."""
    for found in pool2.run(stacks_of_a_thread_that_moves):
        assert found <= {(DEPTH + 1, 0), (0, DEPTH + 1)}
