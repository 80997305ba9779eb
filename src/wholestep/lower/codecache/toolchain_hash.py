"""What the compilers of kernels find out about themselves once a process, in threads beside other work.

Inductor's keys hold a digest of torch's compiler, and Triton's one of all of Triton, hundreds of megabytes. A process
that loads a step asks for both before its first call, and for what talks to the GPU. It takes half a second by itself,
nearly all of it without Python's lock, and nothing of the step has to be known.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from wholestep.util.lazy_import import lazy_import

if TYPE_CHECKING:
    from torch._inductor import codecache
    from torch._inductor.runtime import triton_compat
else:
    codecache = lazy_import("torch._inductor.codecache")
    triton_compat = lazy_import("torch._inductor.runtime.triton_compat")


@functools.cache
def start() -> tuple[threading.Thread, threading.Thread]:
    """Starts the threads, once a process, and gives them: that of Inductor and that of Triton."""
    first, second = (threading.Thread(target=_tried, args=(work,), daemon=True) for work in (_inductor, _triton))
    first.start()
    second.start()
    return first, second


def wait_for_inductor() -> None:
    """Returns when Inductor's keys can be made. Who asks for one before finds all out a second time."""
    start()[0].join()


def wait_for_triton() -> None:
    """Returns when Triton's keys can be made, likewise."""
    start()[1].join()


def _tried(work: Callable[[], object]) -> None:
    # What fails here fails again where it is needed, and is told there.
    with contextlib.suppress(Exception):
        work()


def _inductor() -> None:
    codecache.torch_key()


def _triton() -> None:
    triton_compat.triton_key()
    importlib.import_module("triton.runtime.driver").driver.active  # noqa: B018  # made when it is first asked for
