"""What Triton has made of kernels of our own, as bytes for another process, whose Triton then compiles nothing."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_kept: dict[str, Any] = {}
"""Kernels that any step may launch, by their key in Triton's cache."""


def keep(compiled: Any) -> None:
    """Remembers what a launch has given; nothing, where the interpreter runs kernels."""
    if compiled is not None:
        _kept[compiled.hash] = compiled


def kept() -> list[Any]:
    """What `keep` was given, each once."""
    return list(_kept.values())


def written(compiled: Iterable[Any]) -> bytes:
    """The files of kernels, as a launch or ``warmup`` of Triton gives them."""
    return pickle.dumps([_files(one) for one in compiled])


def take(data: bytes) -> None:
    """Puts what `written` gave where Triton looks for it. Raises whatever reading a pickle and writing files raise."""
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
