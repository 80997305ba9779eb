"""Kernels of which Triton cannot compile one block size: the others do.

Inductor offers several block sizes for most kernels, and leaves out those that need more than a multiprocessor has.
Where Triton itself fails at one (3.6 on Hopper did at a hand-written GELU before a norm of 128 columns, with 8
rows and 2 warps), Inductor gives up the kernel, and with it the graph. Here such a size is left out as well. A worker
process knows nothing of this: what it could not compile is compiled once more in the process that asked. Where no size
is left, the graph is compiled with other kernels (`lower/inductor/compile_fx.py`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch._inductor import async_compile, exc
from torch._inductor import config as inductor_config
from torch._inductor.runtime import triton_heuristics

log = logging.getLogger("wholestep")

_ASKS, _KERNEL = "triton", "_precompile_config"
_ASKED: Any = async_compile.AsyncCompile
_HEURISTICS: Any = triton_heuristics
_TUNED: Any = triton_heuristics.CachingAutotuner
_NO_COMPILER = (exc.CppCompileError, exc.InvalidCxxCompiler, exc.TritonMissing, exc.GPUTooOldForTriton)
_FAILURE = "PassManager::run failed"
"""What Triton says when one of its passes gives up."""
_KNOWN = (
    hasattr(_ASKED, _ASKS)
    and hasattr(_TUNED, _KERNEL)
    and hasattr(_HEURISTICS, "PTXASError")
    and hasattr(async_compile, "CompiledTritonKernels")
)


def is_triton_error(error: Exception) -> bool:
    """Whether a kernel failed since Triton gave up all of its block sizes."""
    return _FAILURE in str(error)


def is_missing_compiler(error: BaseException | None) -> bool:
    """Whether there is no compiler, or it does not work: then no segment can be compiled."""
    while error is not None:
        if isinstance(error, _NO_COMPILER):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def config_fallback() -> Iterator[None]:
    """While it is open, a kernel needs one block size that compiles. Nothing changes with a torch of another form."""
    if not _KNOWN:
        yield
        return
    asks, compiles = getattr(_ASKED, _ASKS), getattr(_TUNED, _KERNEL)

    def compile_or_leave_out(kernel: Any, size: Any) -> Any:
        try:
            return compiles(kernel, size)
        except RuntimeError as error:
            if not is_triton_error(error):
                raise
            log.info("Triton cannot compile a kernel with %s: left out", size)
            raise _HEURISTICS.PTXASError(str(error)) from error  # Inductor goes on with the next one

    def ask(pool: Any, name: str, text: str, *more: Any, **named: Any) -> Any:
        found = asks(pool, name, text, *more, **named)
        if hasattr(found, "result_fn"):  # of a worker
            found.result_fn = partial(_again, found.result_fn, partial(asks, pool, name, text, *more, **named), text)
        return found

    setattr(_TUNED, _KERNEL, compile_or_leave_out)
    setattr(_ASKED, _ASKS, ask)
    try:
        yield
    finally:
        setattr(_TUNED, _KERNEL, compiles)
        setattr(_ASKED, _ASKS, asks)


def _again(result: Callable[[], Any], ask: Callable[[], Any], text: str) -> Any:
    """What a worker compiled, or this process where a worker could not."""
    try:
        return result()
    except Exception as error:
        if not is_triton_error(error):
            raise
    async_compile.CompiledTritonKernels.remove_future(text)
    with inductor_config.patch(compile_threads=1):
        return ask()
