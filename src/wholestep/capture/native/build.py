"""Builds and loads the native guards, once per machine and version of torch.

[Note: nobody waits for the compiler]
Compiling takes some ten to twenty seconds, so it happens in the background, at most once per machine and version of
torch: `module` says None meanwhile, and the guards compare in Python. The library lies in the user's cache folder under
a name that holds a hash of all it depends on, and comes there by one rename, so processes that build at the same
time do no harm; a lock file keeps them from doing it needlessly. Without a compiler, or with a library that fails
its test, everything goes on in Python; `why_not` has the reason. ``WHOLESTEP_NATIVE=0`` in the environment
switches it off. ``python -m wholestep.capture.native`` builds it now.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import importlib.util
import logging
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import IO

import torch

from wholestep.capture.native.self_test import fault

log = logging.getLogger("wholestep")

SWITCH = "WHOLESTEP_NATIVE"
SOURCES = tuple(sorted(Path(__file__).parent.glob("*.cpp")) + sorted(Path(__file__).parent.glob("*.h")))
_FLAGS = ("-O2", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", "-w")
_LIBRARIES = ("torch_python", "torch_cpu", "c10")
BUILD_TIMEOUT_S = 300.0
STALE_S = 600.0
"""Age at which a half of a library counts as left behind by a build that died."""


class Unavailable(Exception):
    """Why there are no native guards, in one sentence."""


class _Build:
    """What this process knows of the library: loaded, on its way, or why not."""

    def __init__(self) -> None:
        self.loaded: ModuleType | None = None
        self.why_not = ""
        self._thread: threading.Thread | None = None
        self._guard = threading.Lock()

    def start(self) -> None:
        """Loads the library, or has it built in the background. Does something the first time only."""
        with self._guard:
            if self._thread is not None or self.loaded is not None or self.why_not:
                return
            if os.environ.get(SWITCH, "1") == "0":
                self.why_not = f"{SWITCH}=0 switches it off"
            elif _exists():
                self.run()
            else:
                self.why_not = "it is being built"
                self._thread = threading.Thread(target=self.run, name="wholestep native build", daemon=True)
                self._thread.start()

    def run(self) -> None:
        """Builds if need be and loads; notes the reason where it cannot."""
        try:
            self.loaded, self.why_not = _load(build()), ""
        except Unavailable as reason:
            self.why_not = str(reason)
        except Exception as error:  # a file system that plays no part, a torch that has moved on: Python will do
            self.why_not = f"{type(error).__name__}: {error}"
        if self.why_not:
            log.info("the guards compare in Python, without native guards: %s", self.why_not)

    def wait(self, timeout_s: float) -> None:
        """Until the build is over."""
        if self._thread is not None:
            self._thread.join(timeout_s)


_build = _Build()
_compilers: set[subprocess.Popen[str]] = set()
_ending = threading.Event()
"""Set when the interpreter ends: no compiler is started any more, and none of another process waited for."""
_starting = threading.Lock()
"""Held while a compiler is started, so that none starts unseen by `_give_up`."""


def module() -> ModuleType | None:
    """The native module, or None while there is none. Never waits for a compiler."""
    if _build.loaded is None and not _build.why_not:
        _build.start()
    return _build.loaded


def why_not() -> str:
    """Why there are no native guards; empty if there are."""
    return _build.why_not


def wait(timeout_s: float = BUILD_TIMEOUT_S) -> str:
    """Waits for the build, if there is one, and returns `why_not`."""
    module()
    _build.wait(timeout_s)
    return why_not()


def folder() -> Path:
    """The folder of built libraries, below the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wholestep" / "native"


def library() -> Path:
    """Where the library for this torch, this Python and this source lies, built or not."""
    parts = [torch.__version__, str(torch.version.git_version), str(sysconfig.get_config_var("SOABI")), sys.platform]
    parts += [str(_cxx11_abi()), *_FLAGS, *(source.read_text(encoding="utf-8") for source in SOURCES)]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return folder() / f"fast_guards-{key}.so"


def build() -> Path:
    """Builds the library unless it is there. Raises Unavailable."""
    path = library()
    if _exists():
        return path
    compiler = _compiler()
    _make_private(path.parent)
    with _alone(path.with_suffix(".lock"), path):
        if not path.exists():
            _compile(compiler, path)
    return path


def _exists() -> bool:
    """Whether the library is there, in a folder that nobody else can write to."""
    try:
        path = library()
        if path.exists():
            _make_private(path.parent)
            return True
    except (OSError, RuntimeError, Unavailable):
        pass  # said again, with its reason, by who wants to build
    return False


def _cxx11_abi() -> bool:
    return bool(torch.compiled_with_cxx11_abi())


def _compiler() -> list[str]:
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]) is not None:
            return command
    raise Unavailable(f"there is no C++ compiler ({named[0] if named else 'c++, g++, clang++'}) on the PATH")


def _make_private(path: Path) -> None:
    """What is loaded from there runs in this process, so nobody else may put it there. Raises Unavailable."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise Unavailable(f"{path} belongs to another user or can be written by others")


@contextmanager
def _alone(lock: Path, path: Path) -> Iterator[None]:
    """Holds the lock file while `path` is built, or waits until another process has built it.

    The system lets go of it when a process dies, however that is. Where a file system has no locks, or a file is
    unlinked that another process has opened, two build at the same time.
    """
    deadline = time.monotonic() + BUILD_TIMEOUT_S
    with lock.open("w") as file:
        while _is_held(file):
            if path.exists():
                yield
                return
            if time.monotonic() > deadline:
                raise Unavailable(f"another process has held {lock} for {BUILD_TIMEOUT_S:.0f} s")
            if _ending.wait(0.2):
                raise Unavailable("the program ends")
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _is_held(file: IO[str]) -> bool:
    """Whether another process holds a lock file; else this one does from here on."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass  # no locks
    return False


def _compile(compiler: list[str], path: Path) -> None:
    """Compiles next to `path` and renames: other processes see a whole library or none."""
    for left in path.parent.glob("*.tmp"):  # of a process that was killed, or that builds for another torch
        with suppress(FileNotFoundError):
            if time.time() - left.stat().st_mtime > STALE_S:
                left.unlink()
    home = Path(torch.__file__).parent
    made = path.with_name(f"{path.stem}.{os.getpid()}.tmp")
    include = [home / "include", home / "include" / "torch" / "csrc" / "api" / "include", sysconfig.get_path("include")]
    command = [*compiler, *_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(_cxx11_abi())}", *(f"-I{one}" for one in include)]
    command += [*(str(one) for one in SOURCES if one.suffix == ".cpp"), "-o", str(made), f"-L{home / 'lib'}"]
    command += [f"-l{name}" for name in _LIBRARIES]
    try:
        process = _started(command)
        try:
            said, _ = process.communicate(timeout=BUILD_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            process.kill()
            process.communicate()
            raise Unavailable(f"{compiler[0]} did not end within {BUILD_TIMEOUT_S:.0f} s") from error
        finally:
            _compilers.discard(process)
        if process.returncode:
            lines = [line for line in said.splitlines() if "error" in line] or said.splitlines() or ["no message"]
            raise Unavailable(f"{compiler[0]} failed: {lines[0].strip()}")
        os.replace(made, path)
    finally:
        made.unlink(missing_ok=True)


def _started(command: list[str]) -> subprocess.Popen[str]:
    """A compiler that `_give_up` ends. Raises Unavailable where the interpreter ends already."""
    with _starting:
        if _ending.is_set():
            raise Unavailable("the program ends")
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        _compilers.add(process)
        return process


def _load(path: Path) -> ModuleType:
    """The library as a module, tested. Raises Unavailable."""
    spec = importlib.util.spec_from_file_location(f"{__name__}.fast_guards", path)
    if spec is None or spec.loader is None:
        raise Unavailable(f"{path} is no extension module for this Python")
    try:
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
    except ImportError as error:
        raise Unavailable(f"{path} cannot be loaded: {error}") from error
    if wrong := fault(loaded):
        raise Unavailable(f"the library fails its test: {wrong}")
    return loaded


def _give_up() -> None:
    """The interpreter ends: a compiler that still runs ends too, and its lock goes with it."""
    with _starting:
        _ending.set()
        running = list(_compilers)
    for process in running:
        process.kill()
    _build.wait(5.0)


atexit.register(_give_up)
