"""Environment of a trace: files of code, packages, and environment variables that it read.

A graph that is used in another process was traced by code that does not run there. So what that code was, and what it
asked the environment for, is written down while it runs, and compared before the graph is used.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest.mock import patch

from wholestep.capture.python.code_owner import is_user_file
from wholestep.capture.python.snapshot import Snapshot

UNSET = "not set"
_STARTED_S = time.time()


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Files, packages and variables that a trace depends on."""

    files: Mapping[str, str]
    """SHA-256 of the user's source files."""
    packages: Mapping[str, str]
    """Versions of the installed packages that were imported."""
    environment: Mapping[str, str]
    """Variables that were read while the step was traced."""

    @classmethod
    def seen(cls, environment: Mapping[str, str]) -> Environment:
        """The environment of a trace that read these variables."""
        return cls(files=_user_files(), packages=_packages(_imported()), environment=environment)

    def now(self) -> Environment:
        """The same files, packages and variables as they are at this moment."""
        return Environment(
            files={path: _digest(path) for path in self.files},
            packages=_packages(self.packages),
            environment={name: os.environ.get(name, UNSET) for name in self.environment},
        )


_OF_CACHES = frozenset({"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"})
"""Variables that say where compilers keep what they have made, and that torch sets itself when it first looks there."""


@contextmanager
def environment_read() -> Iterator[dict[str, str]]:
    """While open, records the environment variables that this thread reads, with their values."""
    read: dict[str, str] = {}
    thread = threading.get_ident()
    original = type(os.environ).__getitem__

    def get(environ: Any, name: Any) -> Any:
        if threading.get_ident() != thread or name in _OF_CACHES:
            return original(environ, name)
        try:
            found = original(environ, name)
        except KeyError:
            read[str(name)] = UNSET
            raise
        read[str(name)] = str(found)
        return found

    with patch.object(type(os.environ), "__getitem__", get):
        yield read


def environment_snapshot(names: Iterable[str]) -> Snapshot:
    """What these variables are at this moment."""
    environ: Any = os.environ
    made = Snapshot(environ._data, "os.environ", tuple(map(environ.encodekey, names)))
    made.held = made.now()
    return made


def _user_files() -> dict[str, str]:
    """Every file that a module was loaded from which is neither Python's nor an installed package's.

    More than what the step runs; but whatever it runs is among them, wherever it was called from. What torch itself has
    written (kernels of Inductor) is no file of the user's; of compiled modules a graph holds calls, and no code.
    """
    modules = [module for name, module in _modules().items() if not name.startswith("torch.")]
    paths = {getattr(module, "__file__", None) for module in modules}
    return {path: _digest(path) for path in sorted(filter(None, paths)) if path.endswith(".py") and is_user_file(path)}


def edited(files: Iterable[str]) -> str | None:
    """The first of some files that was written while this process ran; None if none was.

    What was imported of such a file may be what it said before.
    """
    return next((path for path in files if os.path.exists(path) and os.stat(path).st_mtime > _STARTED_S), None)


def _digest(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        return f"unreadable ({type(error).__name__})"


def _imported() -> Iterable[str]:
    """Names of installed packages that are imported."""
    standard = sys.stdlib_module_names
    modules = _modules()
    names = {name.partition(".")[0] for name in modules if not name.startswith("_")}
    return (name for name in sorted(names - standard) if _is_installed(modules.get(name)))


def _modules() -> dict[str, Any]:
    """What is imported at this moment. Other threads import meanwhile, and a list of the items is no one step: making
    it may collect garbage, and so run Python code and let another thread go on."""
    return sys.modules.copy()


def _is_installed(module: Any) -> bool:
    """Whether a module lies in a folder of packages itself, and not in another package (a vendored one)."""
    path = Path(getattr(module, "__file__", None) or ".")
    folder = path.parent.parent if path.name.startswith("__init__.") else path.parent
    return folder.name in ("site-packages", "dist-packages")


def _packages(names: Iterable[str]) -> dict[str, str]:
    return {name: _version(name) for name in names}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # a package whose distribution has another name: one may not import it to ask
        try:
            found = importlib.util.find_spec(name)
            told = Path(found.origin).stat() if found is not None and found.origin is not None else None
        except (ValueError, ImportError, OSError):
            told = None
        return f"{told.st_size} bytes of {told.st_mtime_ns}" if told is not None else "not installed"


@functools.cache
def source_digest() -> str:
    """A digest of wholestep's own source, which may change without a new version number."""
    made = hashlib.sha256()
    folder = Path(sys.modules["wholestep"].__file__ or "").parent
    for path in sorted(folder.rglob("*.py")):
        made.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return made.hexdigest()[:20]
