"""Folders that are whole or not there: a checkpoint is written beside its place and then renamed into it.

[Note: what a kill leaves]
A save of ``run`` goes through these names, and only the first rank renames and removes::

    .run.<id>.saving   ranks write here; every file is on the disk before the next line
    .run.<id>.whole    from this rename on the new checkpoint counts; readers take it before ``run``
    .run.<id>.old      the one before, out of the way: a folder cannot replace another one in one step
    run                the new one; the old one is removed

Whatever moment ends the process, one of ``.whole`` and ``run`` is a whole checkpoint. The next save finishes what a
kill has left and removes the rest. Ids are new for each save, so a rank that still writes for a save that is lost
writes into a folder that nobody reads.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from wholestep.errors import CheckpointError

METADATA = ".metadata"
"""The file that torch's checkpoints write last."""
SUFFIX = ".distcp"
"""Of all their other files."""

_SAVING, _WHOLE, _OLD = "saving", "whole", "old"


def temporary(path: Path, number: int) -> Path:
    """Where ranks write the checkpoint that will be `path`. `number` is new for each save, the same on all ranks."""
    return _sibling(path, f"{number:x}", _SAVING)


def tidy(path: Path) -> None:
    """Finishes or removes what a save of `path` that was killed has left. Only one process may, and none may write.

    Raises CheckpointError where `path` holds anything that is no part of a checkpoint: it would be lost.
    """
    if path.exists():
        _refuse_other_files(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for whole in _all(path, _WHOLE):
        _replace(whole, path)
    for remains in (*_all(path, _SAVING), *_all(path, _OLD)):
        shutil.rmtree(remains, ignore_errors=True)


def commit(folder: Path, path: Path) -> None:
    """Puts a folder that `temporary` has named, whose files are on the disk, into its place. One process calls this."""
    _flush(folder)
    whole = folder.with_suffix(f".{_WHOLE}")
    folder.rename(whole)
    _flush(path.parent)
    _replace(whole, path)


def whole_folder(path: Path) -> Path:
    """The folder of the last whole checkpoint of `path`: itself, or one that a killed save has not yet put there.

    Raises CheckpointError where there is none.
    """
    found = next(iter(_all(path, _WHOLE)), path)
    if (found / METADATA).is_file():
        return found
    if path.is_file() or any(path.glob("*.safetensors")):
        raise CheckpointError(f"{path} is no folder of a checkpoint. wholestep.load_safetensors reads safetensors.")
    inside = f"has no {METADATA} file, which every whole checkpoint has" if path.is_dir() else "does not exist"
    raise CheckpointError(f"No checkpoint to load: {path} {inside}.")


def _refuse_other_files(path: Path) -> None:
    others = [] if path.is_dir() else [path]
    if path.is_dir():
        others = [one for one in path.iterdir() if one.name != METADATA and one.suffix != SUFFIX]
    if others:
        raise CheckpointError(
            f"{path} cannot be replaced by a checkpoint: {', '.join(sorted(one.name for one in others)[:5])} would be "
            f"lost. Choose a folder that only checkpoints are saved to."
        )


def _replace(whole: Path, path: Path) -> None:
    old = whole.with_suffix(f".{_OLD}")
    if path.exists():
        path.rename(old)
    whole.rename(path)
    _flush(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sibling(path: Path, number: str, state: str) -> Path:
    return path.parent / f".{path.name}.{number}.{state}"


def _all(path: Path, state: str) -> list[Path]:
    """Folders of saves of `path` that are in a state."""
    begin, end = f".{path.name}.", f".{state}"
    if not path.parent.is_dir():
        return []
    names = (one.name for one in path.parent.iterdir() if one.name.startswith(begin) and one.name.endswith(end))
    return [path.parent / name for name in names if name.removeprefix(begin).removesuffix(end).isalnum()]


def _flush(folder: Path) -> None:
    """Has the names in a folder written to the disk, where the system can."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
