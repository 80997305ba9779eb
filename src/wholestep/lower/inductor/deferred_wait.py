"""Inductor's waits for its workers, put off: who compiles several graphs has all of them written first.

Inductor writes the kernels of a graph, gives them to processes that compile them, and waits. With ten graphs one after
the other the workers stand still while a graph is written, and who writes stands still while they work; of the first
call of W2 on 2 H200s that was 3 of 20 s. Here the futures stay in the module for a while, where kernels will be, and
what Inductor does after its wait is done later, too: it collects the binaries and writes an entry to its cache.

    with put_off() as rest:
        graph = compile_fx_inner(...)    # not to be called yet
    ...                                  # other graphs
    rest()
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from torch._inductor import async_compile, codecache
from torch._inductor.triton_bundler import TritonBundler

_WAITS: Any = async_compile.AsyncCompile
_WRITES: Any = codecache.FxGraphCache
_WAIT, _WRITE = "wait", "_save_graph"
_KNOWN = all(
    hasattr(owner, name)
    for owner, name in (
        (_WAITS, _WAIT), (_WRITES, _WRITE), (TritonBundler, "begin_compile"), (TritonBundler, "collect"),
        (TritonBundler, "end_compile"),
    )
)  # fmt: skip


@contextlib.contextmanager
def defer_waits() -> Iterator[Callable[[], None]]:
    """While it is open, what this thread has Inductor compile is not waited for. For one graph.

    Gives what does the rest, once: it raises what Inductor would have raised for a kernel that cannot be compiled, and
    has to be called with the shape environment of the graph in the tracing context, as Inductor's cache asks for it.
    Nothing is put off with a torch whose compiler has another form.
    """
    waits, writes = list[Callable[[], None]](), list[tuple[Any, ...]]()
    if not _KNOWN:
        yield lambda: None
        return
    thread, write = threading.get_ident(), inspect.getattr_static(_WRITES, _WRITE)
    wait, write_now = getattr(_WAITS, _WAIT), getattr(_WRITES, _WRITE)

    def wait_later(workers: Any, scope: dict[str, Any]) -> None:
        if threading.get_ident() == thread:
            waits.append(partial(wait, workers, scope))
        else:
            wait(workers, scope)

    def write_later(*entry: Any) -> None:
        if threading.get_ident() == thread:
            writes.append(entry)
        else:
            write_now(*entry)

    setattr(_WAITS, _WAIT, wait_later)
    setattr(_WRITES, _WRITE, staticmethod(write_later))
    try:
        yield partial(_run_deferred, waits, writes, write_now)
    finally:
        setattr(_WAITS, _WAIT, wait)
        setattr(_WRITES, _WRITE, write)


def _run_deferred(waits: list[Callable[[], None]], writes: list[tuple[Any, ...]], write: Callable[..., None]) -> None:
    if not writes:  # found in the cache, or there is none
        for wait in waits:
            wait()
        return
    TritonBundler.begin_compile()
    try:
        for wait in waits:
            wait()
        found, _ = TritonBundler.collect()
    finally:
        TritonBundler.end_compile()
    for key, graph, *rest in writes:
        # Until the workers are up, kernels are compiled where they are written.
        early = graph._triton_bundle
        both = found if early is None else _joined(early, found)
        graph.set_triton_bundle(both)
        write(key, graph, *rest)


def _joined(early: Any, late: Any) -> Any:
    """The bundle of all kernels, where some were there before the rest was waited for."""
    return replace(
        late,
        kernel_artifacts=[*early.kernel_artifacts, *late.kernel_artifacts],
        static_autotuners=[*early.static_autotuners, *late.static_autotuners],
    )
