"""Artifacts: a compiled step as a file, read and written whole, and refused where somebody else may have written it.

[Note: file format]
One line that says what it is, one with the SHA-256 of all that follows, a header in JSON (name of the step,
fingerprint) and the step itself, pickled. A pickle is code: to load it is to run it. So the header is all that is read
of a file before it is known that it may be trusted, and that it fits.

[Note: trusted files]
The automatic cache lies in the user's own folder, which nobody else can write to, and so do its files. A file from
elsewhere is loaded only where the user says that it may be.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from wholestep.api.cache.records import Fingerprint, Header
from wholestep.errors import ArtifactError

MAGIC = b"wholestep step, format 3\n"
"""The first line. Its number goes up with every change of what is pickled, so that no version misreads another."""
_MAX_FILES = 16  # files per step and rank in the cache


def file_name(step: str, fingerprint: Fingerprint, plan: str) -> str:
    """The name of a file in the cache: ``train_step-<digest of the step>-<of the fingerprint>-<of the plan>``.

    `plan`: tells apart what calls with this fingerprint run.
    """
    return f"{name_of_all(step, fingerprint)}{_digest(plan)[:12]}"


def name_of_all(step: str, fingerprint: Fingerprint) -> str:
    """The beginning of the names of all files with this fingerprint."""
    return f"{file_prefix(step)}{_digest(json.dumps(list(fingerprint.items())))}-"


def file_prefix(step: str) -> str:
    """The beginning of the names of all files of a step, or of a rank's."""
    name = "".join(letter if letter.isalnum() or letter == "_" else "." for letter in step.rpartition(":")[2])
    return f"{name[-60:]}-{_digest(step)[:12]}-"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:32]


def write(path: Path, header: Header, body: bytes) -> None:
    """Writes a file that only its owner can read; whoever reads sees the old one or the new one, whole.

    Raises OSError.
    """
    text = json.dumps(
        {"step": header.step, "fingerprint": header.fingerprint, "environment": header.environment}
    ).encode()
    rest = len(text).to_bytes(8, "big") + text + body
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}", suffix=".tmp")  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(MAGIC + hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def read(path: Path) -> tuple[Header, bytes]:
    """Reads the header and the body of a file; the body is not unpickled.

    Raises ArtifactError for a file that is not there, is none of this format, or is not whole.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror or error}.") from error
    if not data.startswith(MAGIC):
        raise ArtifactError(
            f"{path} is no step that this version of wholestep has saved: it does not begin with {MAGIC.decode()!r}."
        )
    start = len(MAGIC) + 65
    rest = data[start:]
    if data[len(MAGIC) : start] != hashlib.sha256(rest).hexdigest().encode() + b"\n":
        raise ArtifactError(
            f"{path} is damaged: its content is not what was written ({len(data)} bytes). Save it anew."
        )
    end = 8 + int.from_bytes(rest[:8], "big")
    try:
        fields = json.loads(rest[8:end])
        header = Header(
            step=str(fields["step"]),
            fingerprint=_fingerprint_from_json(fields["fingerprint"]),
            environment=_fingerprint_from_json(fields["environment"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{path} has a header that cannot be read: {type(error).__name__}: {error}.") from error
    return header, rest[end:]


def _fingerprint_from_json(fields: Any) -> Fingerprint:
    return {str(name): tuple((str(a), str(b)) for a, b in lines) for name, lines in fields.items()}


def folder() -> Path:
    """The automatic cache, below the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wholestep" / "steps"


def make_folder() -> Path:
    """The automatic cache, made if it is not there. Raises ArtifactError for one that others can write to."""
    path = folder()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ArtifactError(f"The cache {path} cannot be made: {error.strerror or error}.") from error
    check_private(path)
    return path


def check_private(path: Path) -> None:
    """Raises ArtifactError for a file or folder that somebody else owns or can write to, or that is a link."""
    try:
        stats = path.lstat()
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror or error}.") from error
    if stat.S_ISLNK(stats.st_mode):
        raise ArtifactError(f"{path} is a link. A saved step is code, and is loaded only from where it was saved.")
    if stats.st_uid != os.getuid():
        raise ArtifactError(
            f"{path} belongs to the user with number {stats.st_uid}, and you are {os.getuid()}. A saved step is code: "
            f"whoever wrote it would run what they like as you."
        )
    if stats.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ArtifactError(
            f"{path} can be written to by others (mode {stat.S_IMODE(stats.st_mode):o}). A saved step is code: whoever "
            f"changes it runs what they like as you. Delete it, or take that right away (chmod go-w) if you know that "
            f"nobody has used it."
        )


def check_trusted(path: Path, *, trusted: bool) -> None:
    """Raises ArtifactError for a file from outside of the own cache that the user has not said to trust."""
    inside = path.absolute().parent == folder().absolute()
    if inside:
        check_private(path.parent)
        check_private(path)
    elif not trusted:
        raise ArtifactError(
            f"{path} does not come from the cache in {folder()}. A saved step is code: loading it runs whatever its "
            f"writer has put there, with all that you may do. Say wholestep.load(path, trusted=True) for a file that "
            f"you or somebody you trust has saved, and that nobody else could have changed."
        )


def newest_first(files: Iterable[Path]) -> list[Path]:
    """Sorts files by age. Other processes evict files, too: one that is gone by now is left out."""
    ages: dict[Path, int] = {}
    for path in files:
        with contextlib.suppress(FileNotFoundError):
            ages[path] = path.stat().st_mtime_ns
    return sorted(ages, key=ages.__getitem__, reverse=True)


def evict_old(files: Iterable[Path]) -> None:
    """Removes all but the newest files of a step."""
    for path in newest_first(files)[_MAX_FILES:]:
        path.unlink(missing_ok=True)
