"""Reads and writes folders of ``torch.distributed.checkpoint``: in one piece, and without code that runs on loading.

[Note: what is pickled]
Two things in such a folder are pickles. ``.metadata`` lists names, shapes and files: it is read by an unpickler that
knows the records of torch's own format and nothing else. Values that are no tensors are read with
``torch.load(weights_only=True)``, as tensors are. torch's own loader does neither.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, WriteItem, WriteItemType

from wholestep.errors import CheckpointError
from wholestep.runtime.checkpoint.folders import METADATA, commit

_ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(("pathlib", name) for name in ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")),
    *(("pathlib._local", name) for name in ("Path", "PosixPath", "WindowsPath")),  # Python 3.13
}
"""What a ``.metadata`` file may name besides types of tensors and the records of its format. None of them acts."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """The thing of that name. Raises CheckpointError for what has no place in such a file."""
        if module == records.__name__ and isinstance(found := getattr(records, name, None), type):
            if found.__module__ == module:
                return found
        elif (module, name) in _ALLOWED:
            return super().find_class(module, name)
        elif module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise CheckpointError(f"its {METADATA} file names {module}.{name}, which is no part of a checkpoint")


def read_metadata(folder: Path) -> Metadata:
    """What a checkpoint says of itself. Runs no code of the file, and sees that files are as long as they should be.

    Raises CheckpointError for a file that is none, and for parts that are missing or cut off.
    """
    try:
        with open(folder / METADATA, "rb") as file:
            found = _MetadataUnpickler(file).load()
        if not isinstance(found, Metadata):
            raise CheckpointError(f"its {METADATA} file holds a {type(found).__name__}")
        _check_files(folder, found)
    except CheckpointError as error:
        raise CheckpointError(f"{folder} was not loaded: {error}.") from error
    except Exception as error:
        raise CheckpointError(f"{folder / METADATA} cannot be read ({type(error).__name__}: {error}).") from error
    return found


def _check_files(folder: Path, metadata: Metadata) -> None:
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in ends.items():
        if Path(name).name != name:
            raise CheckpointError(f"its {METADATA} file points to {name!r}, outside of the folder")
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"its file {name} is missing")
        if file.stat().st_size < end:
            raise CheckpointError(f"its file {name} has {file.stat().st_size} bytes and should have {end}")


class Reader(FileSystemReader):
    """Reads a folder whose metadata is there already."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self) -> Metadata:
        """The metadata that was given."""
        return self._metadata


class LoadPlanner(DefaultLoadPlanner):
    """Fills a flat dict of names: tensors in place, and None by values that are no tensors."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Puts a value that is no tensor in its place."""
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


class SavePlanner(DefaultSavePlanner):
    """Saves what several ranks have of the first of them, and refuses values whose loading would run code.

    Ranks may differ in what is whole, and then the first one counts: in buffers, which a step starts with from rank 0.
    """

    def __init__(self) -> None:
        super().__init__(dedup_save_to_lowest_rank=True)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """The bytes of a value that is no tensor. Raises CheckpointError for one that loading would refuse."""
        value = object.item() if isinstance(object, np.generic) else object
        written = super().transform_object(write_item, value)
        if write_item.type is WriteItemType.BYTE_IO:
            check_loadable(write_item.index.fqn, value, written)
        return written


def check_loadable(name: str, value: object, written: io.BytesIO) -> None:
    """Raises CheckpointError for a value that cannot be read again without running code of the file."""
    written.seek(0)
    try:
        torch.load(written, weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{name} is a {type(value).__module__}.{type(value).__qualname__}, which could not be loaded again without "
            f"running code of the file. Checkpoints hold tensors, numbers, text, and lists, tuples and dicts of them."
        ) from error


class Writer(FileSystemWriter):
    """Writes into a temporary folder. The first rank puts it into its place after the last one's last byte."""

    def __init__(self, folder: Path, path: Path) -> None:
        super().__init__(folder, sync_files=True)
        self._folder, self._path = folder, path

    def storage_meta(self) -> StorageMeta | None:
        """Says nothing of where it was written."""
        return StorageMeta(save_id=self.save_id)

    def finish(self, metadata: Metadata, results: Any) -> None:
        """Runs on the first rank once all have written. Raises CheckpointError where it does not see their files."""
        super().finish(metadata, results)
        try:
            read_metadata(self._folder)
        except CheckpointError as error:
            raise CheckpointError(f"the ranks do not share the file system of {self._path}: {error}") from error
        commit(self._folder, self._path)


def silence_one_process() -> None:
    """Has torch not warn at every checkpoint of a single process that it is one; in a thread of torch's, too."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def nested(flat: Mapping[str, Any], paths: Mapping[str, tuple[str | int, ...]]) -> dict[str, Any]:
    """The tree of dicts and lists whose leaves a checkpoint holds in a row. Numbers in a path are places in a list."""
    root: dict[str, Any] = {}
    for name, value in flat.items():
        path = paths[name]
        inside: Any = root
        for step, following in zip(path, (*path[1:], None), strict=True):
            new: Any = value if following is None else [] if isinstance(following, int) else {}
            if isinstance(inside, list):
                inside.extend([None] * (int(step) + 1 - len(inside)))
                if inside[int(step)] is None:
                    inside[int(step)] = new
            else:
                inside.setdefault(step, new)
            inside = inside[step]
    return root
