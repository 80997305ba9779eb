"""Empty caches for tests, with the native part, which takes a compiler most of a minute, as it is built already."""

from __future__ import annotations

from pathlib import Path

from wholestep.capture.native import build


def empty_cache(folder: Path) -> Path:
    """Makes `folder`, for ``XDG_CACHE_HOME``: no saved step, no calibration, and the native part of this process."""
    built = build.folder()
    built.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / "wholestep").mkdir(parents=True)
    (folder / "wholestep" / "native").symlink_to(built.resolve())
    return folder
