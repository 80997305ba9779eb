"""Real text that is on every machine: Python's source, split into train and held-out."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from wholestep.errors import ConfigError

HELD_OUT_ONE_IN = 10
"""One file in this many is held out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Two flat byte tensors (uint8) and where they came from."""

    train: Tensor
    held_out: Tensor
    num_files: int
    folder: Path


def standard_library(*, max_bytes: int, folder: Path | None = None) -> Text:
    """Read at most about `max_bytes` of Python files below `folder` (default: the standard library).

    Files come in an order that depends on their names alone (a hash, so that a bounded read is a fair sample of all
    packages) and a file is held out by the same hash: no text is in both halves.
    Raises ConfigError where fewer than 64 KiB are found: too little to train on.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    halves: tuple[list[bytes], list[bytes]] = ([], [])
    total_bytes = num_files = 0
    for digest, path in sorted((_digest(path, folder), path) for path in _python_files(folder)):
        if total_bytes >= max_bytes:
            break
        content = path.read_bytes()
        halves[digest % HELD_OUT_ONE_IN == 0].append(content)
        total_bytes += len(content)
        num_files += 1
    train, held_out = (b"\n".join(half) for half in halves)
    if min(len(train), 9 * len(held_out)) < 2**16:
        raise ConfigError(
            f"The demo trains on the .py files of the standard library and wants at least 64 KiB of them, but found "
            f"{total_bytes} bytes in {num_files} files below {folder}. Install Python with the sources of its library."
        )
    return Text(train=_as_tensor(train), held_out=_as_tensor(held_out), num_files=num_files, folder=folder)


def batch(text: Tensor, *, rows: int, context: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """`rows` windows at random places: inputs and the bytes that follow them, both (rows, context) int64 on the CPU."""
    starts = torch.randint(len(text) - context, (rows, 1), generator=draw)
    windows = text[starts + torch.arange(context + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _python_files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*.py"):
        # What a user installed is not the same on two machines; tests of the library are mostly tables.
        if path.is_file() and not {"site-packages", "dist-packages", "test", "tests"} & set(path.parts):
            yield path


def _digest(path: Path, folder: Path) -> int:
    return int.from_bytes(hashlib.sha256(path.relative_to(folder).as_posix().encode()).digest()[:8], "big")


def _as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
