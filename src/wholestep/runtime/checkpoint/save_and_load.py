"""The two ways of a checkpoint: live objects into a folder, by all ranks at once, and back."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict_loader import load as read
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as write

from wholestep.errors import CheckpointError, ConfigError
from wholestep.runtime.checkpoint.contents import Contents
from wholestep.runtime.checkpoint.folders import temporary, tidy, whole_folder
from wholestep.runtime.checkpoint.storage import (
    LoadPlanner,
    Reader,
    SavePlanner,
    Writer,
    nested,
    read_metadata,
    silence_one_process,
)
from wholestep.runtime.checkpoint.together import common_number, explained, on_all_ranks
from wholestep.runtime.distributed.world import World


class PendingCheckpoint:
    """A checkpoint that is being written, or has been."""

    def __init__(self, path: Path, world: World, written: Future[Any] | None = None) -> None:
        """`written`: what ends when it is in its place; None if it is."""
        self.path = path
        self._world, self._written = world, written

    def done(self) -> bool:
        """Whether it has ended on this rank, well or not. Never waits."""
        return self._written is None or self._written.done()

    def result(self, timeout_s: float | None = None) -> Path:
        """The folder, once the whole checkpoint is in it.

        Args:
            timeout_s: how long to wait, in seconds; None: as long as it takes.

        Raises:
            CheckpointError: it could not be written. The checkpoint before it is untouched.
            RankMissingError: another rank died.
            TimeoutError: it is not there yet.
        """
        written = self._written
        if written is None:
            return self.path
        _forget(self)
        with explained(self._world, f"saving {self.path}"):
            try:
                written.result(timeout_s)
            except FutureTimeout:
                if written.done():
                    raise
                _remember(self)
                raise TimeoutError(f"{self.path} is not written after {timeout_s} s.") from None
        return self.path


_pending: list[PendingCheckpoint] = []
"""At most one: the last that was begun and whose result nobody has asked for."""
_background: list[tuple[World, Any]] = []
"""At most one: the group of processes over which ranks speak of a checkpoint beside a training."""


def save(path: Path, contents: Contents, world: World, *, asynchronous: bool) -> PendingCheckpoint:
    """See `wholestep.save_checkpoint`."""
    finish_pending()
    what = f"saving {path}"
    folder = temporary(path, common_number(world))
    tree = on_all_ranks(world, what, partial(_prepared, path, contents, world))
    writer, planner = Writer(folder, path), SavePlanner()
    silence_one_process()
    with explained(world, what):
        if not asynchronous:
            write(tree, storage_writer=writer, planner=planner)
            return PendingCheckpoint(path, world)
        group = _background_group(world)
        written: Any = async_save(tree, storage_writer=writer, planner=planner, process_group=group)
    pending = PendingCheckpoint(path, world, written)
    _remember(pending)
    return pending


def load(path: Path, contents: Contents, world: World) -> None:
    """See `wholestep.load_checkpoint`."""
    finish_pending()
    what = f"loading {path}"
    folder, metadata = on_all_ranks(world, what, partial(_opened, path))
    reading = partial(_read, folder, metadata, world, what)
    ranks: dict[str, Any] = reading({"step.ranks": None} if "step.ranks" in metadata.state_dict_metadata else {})
    num_saved_ranks = int(ranks.get("step.ranks", 1))

    def prepared() -> tuple[dict[str, Any], dict[str, Tensor]]:
        paths = contents.values_to_read(metadata, world, num_saved_ranks)
        records = metadata.state_dict_metadata
        values = {name: None for name in paths if isinstance(records[name], BytesStorageMetadata)}
        return values, contents.targets(metadata, paths)

    def checked(values: dict[str, Any]) -> None:
        contents.check(nested(values, metadata.planner_data))

    fits = f"{folder} was not loaded"
    values, targets = on_all_ranks(world, what, partial(_named, fits, prepared))
    values = reading(values)
    on_all_ranks(world, what, partial(_named, fits, partial(checked, values)))
    tensors = reading(targets)
    on_all_ranks(world, what, partial(_check_unchanged, path, metadata))
    contents.load(nested({**values, **tensors}, metadata.planner_data), metadata, world)


def finish_pending() -> None:
    """Waits for a checkpoint that is still being written, and raises what went wrong with it."""
    while _pending:
        _pending[0].result()


def _prepared(path: Path, contents: Contents, world: World) -> dict[str, Any]:
    if world.rank == 0:
        tidy(path)
    return contents.tree(world)


def _opened(path: Path) -> tuple[Path, Metadata]:
    folder = whole_folder(path)
    return folder, read_metadata(folder)


def _read(folder: Path, metadata: Metadata, world: World, what: str, values: dict[str, Any]) -> dict[str, Any]:
    """Fills the tensors among values, and puts those that are none in the place of None."""
    if values:
        silence_one_process()
        with explained(world, what):
            read(values, storage_reader=Reader(folder, metadata), planner=LoadPlanner())
    return values


def _named(what: str, do: Any) -> Any:
    try:
        return do()
    except CheckpointError as error:
        raise CheckpointError(f"{what}: {error}.") from error


def _check_unchanged(path: Path, metadata: Metadata) -> None:
    """Raises CheckpointError where another save has replaced the folder while it was read."""
    _, now = _opened(path)
    if _id_of(now) != _id_of(metadata):
        raise CheckpointError(f"{path} was replaced by a newer checkpoint while it was read. Load it once more.")


def _id_of(metadata: Metadata) -> str | None:
    return metadata.storage_meta.save_id if metadata.storage_meta is not None else None


def _remember(pending: PendingCheckpoint) -> None:
    _pending[:] = [pending]


def _forget(pending: PendingCheckpoint) -> None:
    _pending[:] = [one for one in _pending if one is not pending]


def _background_group(world: World) -> Any:
    """Ranks speak of the checkpoint over it in another thread, so no message of the training may go that way."""
    if world.size == 1:
        return None
    if not dist.is_gloo_available():
        raise ConfigError("save_checkpoint(asynchronous=True) wants gloo, which this build of torch has not.")
    if not _background or _background[0][0] is not world:
        _background[:] = [(world, dist.new_group(backend="gloo"))]
    return _background[0][1]
