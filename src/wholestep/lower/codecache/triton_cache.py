"""Kernels of our own: built beside other work, and what Triton has made of them as bytes for another process, whose
Triton then compiles nothing."""

from __future__ import annotations

import contextlib
import importlib
import pickle
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from wholestep.lower.codecache import toolchain_hash
from wholestep.util import background

Job = Callable[[], Any]
"""Has Triton compile a kernel as a launch would (by its ``warmup``), and gives what a launch gives."""

_kept: dict[str, Any] = {}
"""Kernels that any step may launch, by their key in Triton's cache."""
_builds: list[threading.Thread] = []


def keep(compiled: Any) -> None:
    """Remembers what a launch has given; nothing, where the interpreter runs kernels."""
    if compiled is not None:
        _kept[compiled.hash] = compiled


def build_in_background(jobs: Iterable[Job], device: torch.device) -> None:
    """Builds kernels that any step may launch, each in a thread: Triton works without Python's lock for the most part.

    What goes wrong there goes wrong again where the kernel is launched, and is told there.
    """
    _builds.extend(background.start_in_background(partial(_build, job, device)) for job in jobs)


def wait() -> None:
    """Returns when what was begun is built. Who launches such a kernel without would build it a second time."""
    while _builds:
        _builds.pop().join()


def _build(job: Job, device: torch.device) -> None:
    toolchain_hash.wait_for_triton()
    if background.is_ending():
        return
    with torch.cuda.device(device):
        compiled = job()
        keep(compiled)
        make_ready(compiled)


def make_ready(compiled: Any) -> None:
    """Has Triton make what launches a kernel on the current GPU.

    That is a module in C for every signature, and takes a quarter of a second, for which the first launch would wait.
    A Triton that does it otherwise does so in the first launch.
    """
    with contextlib.suppress(AttributeError):
        compiled._init_handles()


def addresses(types: Iterable[torch.dtype]) -> tuple[Any, ...]:
    """What stands for tensors of these types that start on 16 bytes, in a ``warmup`` of Triton."""
    mock = importlib.import_module("triton.runtime.jit").MockTensor
    return tuple(map(mock, types))


def kept_kernels() -> list[Any]:
    """What `keep` was given, each once, when what was begun is built."""
    wait()
    return list(_kept.values())


def dumps(compiled: Iterable[Any]) -> bytes:
    """The files of kernels, as a launch or ``warmup`` of Triton gives them."""
    return pickle.dumps([_files(one) for one in compiled])


def loads(data: bytes) -> None:
    """Puts what `dumps` gave where Triton looks for it. Raises whatever reading a pickle and writing files raise."""
    for key, files in pickle.loads(data):
        cache = _caches().get_cache_manager(key)
        group = {name: cache.put(content, name) for name, content in files.items()}
        cache.put_group(next(name for name in files if name.endswith(".json")), group)


def _files(compiled: Any) -> tuple[str, dict[str, bytes]]:
    """What Triton needs of a kernel to launch it: the key in its cache on disk, and the files there."""
    paths = {name: Path(path) for name, path in compiled.metadata_group.items()}
    return compiled.hash, {
        name: path.read_bytes() for name, path in paths.items() if path.suffix in (".json", ".cubin")
    }  # fmt: skip


def _caches() -> Any:
    return importlib.import_module("triton.runtime.cache")
