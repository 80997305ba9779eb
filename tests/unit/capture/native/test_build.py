"""The native library is built once, beside the program, and comes without anybody waiting for it."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from wholestep.capture.native import build


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, a compiler that copies the library that is there, and a door that knows nothing.

    The compiler takes half a second, and longer while there is a file ``hold``.
    """
    built = build.library()
    assert build.wait() == ""
    compiler = tmp_path / "compiler"
    compiler.write_text(
        f"#!{sys.executable}\nimport os, shutil, sys, time\nopen({str(tmp_path / 'calls')!r}, 'a').write('x')\n"
        f"time.sleep(0.5)\nwhile os.path.exists({str(tmp_path / 'hold')!r}): time.sleep(0.01)\n"
        f"shutil.copy({str(built)!r}, sys.argv[sys.argv.index('-o') + 1])\n"
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.delenv(build.SWITCH, raising=False)
    monkeypatch.setattr(build, "_build", build._Build())
    yield tmp_path
    build.wait(10)


def num_builds(cache: Path) -> int:
    calls = cache / "calls"
    return len(calls.read_text()) if calls.exists() else 0


@contextmanager
def held_lock() -> Iterator[Path]:
    """The lock file, held as by another process that builds."""
    lock = build.library().with_suffix(".lock")
    lock.parent.mkdir(mode=0o700, parents=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield lock


def test_the_first_call_does_not_wait(cache: Path) -> None:
    hold = cache / "hold"
    hold.touch()
    assert build.module() is None
    assert build.why_not() == "it is being built"
    hold.unlink()
    assert build.wait() == ""
    assert build.module() is not None
    assert build.library().parent.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in build.library().parent.iterdir()] == [build.library().name]


def test_what_is_built_is_loaded_at_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.build()
    monkeypatch.setattr(build, "_build", build._Build())
    assert build.module() is not None
    assert num_builds(cache) == 1


def test_threads_build_once(cache: Path) -> None:
    threads = [threading.Thread(target=build.build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert build.library().exists()
    assert num_builds(cache) == 1


KILLED = """
import os, signal, sys
from wholestep.capture.native import build
build._compiler = lambda: ["sh", "-c", f"kill -9 {os.getpid()}"]
build.build()
"""


def test_the_lock_of_a_killed_process_is_taken_over(cache: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED], check=False, timeout=120)
    lock = build.library().with_suffix(".lock")
    assert killed.returncode == -signal.SIGKILL
    assert lock.exists()
    half = lock.with_suffix(".tmp")
    half.touch()
    old = time.time() - build.STALE_S - 1
    os.utime(half, (old, old))
    build.build()
    assert not half.exists()
    assert build.library().exists()
    assert not lock.exists()


def test_a_build_for_another_torch_may_end_meanwhile(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is renamed between two looks at the folder."""
    path, glob = build.library(), Path.glob
    other = path.with_name("fast_guards-other.7.tmp")
    monkeypatch.setattr(Path, "glob", lambda folder, what: [*glob(folder, what), other])
    build.build()
    assert path.exists()


def test_a_lock_that_is_held_is_respected(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "BUILD_TIMEOUT_S", 0.3)
    with held_lock() as lock, pytest.raises(build.Unavailable, match="another process has held"):
        build.build()
    assert num_builds(cache) == 0
    assert lock.exists()


def test_a_missing_compiler_is_told_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.INFO, logger="wholestep"):
        assert build.wait() == "there is no C++ compiler (no-such-compiler) on the PATH"
        for _ in range(3):
            assert build.module() is None
    assert len([record for record in caplog.records if "no C++ compiler" in record.getMessage()]) == 1


def test_a_failing_compiler_is_told_with_its_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = cache / "bad"
    bad.write_text("#!/bin/sh\necho note\necho 'look.cpp:3: error: no header'\nexit 1\n")
    bad.chmod(0o700)
    monkeypatch.setenv("CXX", str(bad))
    assert build.wait().endswith("failed: look.cpp:3: error: no header")
    assert list(build.library().parent.iterdir()) == []


def test_a_file_that_is_no_library_is_told(cache: Path) -> None:
    path = build.library()
    path.parent.mkdir(mode=0o700, parents=True)
    path.write_bytes(b"no library")
    assert "cannot be loaded" in build.wait()


def test_a_folder_that_others_can_write_to_is_refused(cache: Path) -> None:
    path = build.build()
    path.parent.chmod(0o777)
    assert "can be written by others" in build.wait()
    assert build.module() is None


def test_a_library_that_fails_its_test_is_told(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "fault", lambda module: "dict: cleared")
    assert build.wait() == "the library fails its test: dict: cleared"


def test_the_switch_of_the_environment_turns_it_off(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.SWITCH, "0")
    assert build.wait() == "WHOLESTEP_NATIVE=0 switches it off"
    assert build.module() is None
    assert num_builds(cache) == 0


def test_a_process_that_ends_takes_its_build_with_it(cache: Path) -> None:
    code = "from wholestep.capture.native import build; assert build.module() is None; import time; time.sleep(0.3)"
    slow = cache / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o700)
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "CXX": str(slow)}, timeout=50)
    assert time.monotonic() - start < 45
    assert list(build.library().parent.iterdir()) == []


def test_a_process_that_ends_starts_no_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread may be on the way there, and nobody would end what it starts."""
    monkeypatch.setattr(build, "_ending", threading.Event())
    build._give_up()
    with pytest.raises(build.Unavailable, match="the program ends"):
        build.build()
    assert num_builds(cache) == 0
    assert list(build.library().parent.iterdir()) == []


def test_a_process_that_ends_waits_for_no_other_one(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_ending", threading.Event())
    with held_lock() as lock:
        assert build.module() is None
        build._give_up()
        assert build.why_not() == "the program ends"
    assert lock.exists()


def test_a_file_system_without_locks_builds_all_the_same(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    assert build.build().exists()
