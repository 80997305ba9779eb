"""The two ways of a checkpoint: live objects into a folder, by all ranks at once, and back."""

from __future__ import annotations

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
from wholestep.runtime.checkpoint.pending import PendingCheckpoint, finish_pending
from wholestep.runtime.checkpoint.storage import (
    LoadPlanner,
    Reader,
    SavePlanner,
    Writer,
    nested,
    read_metadata,
    silence_one_process,
)
from wholestep.runtime.checkpoint.together import check_same, common_number, explained, on_all_ranks
from wholestep.runtime.distributed.world import World

_background: list[tuple[World, Any]] = []
"""At most one: the group of processes over which ranks speak of a checkpoint beside a training."""


def save(path: Path, contents: Contents, world: World, *, asynchronous: bool) -> PendingCheckpoint:
    """See `wholestep.save_checkpoint`."""
    finish_pending()
    what = f"saving {path}"
    folder = temporary(path, common_number(world))
    tree = on_all_ranks(world, what, partial(_prepared, path, contents, world))
    writer, planner = Writer(folder, path), SavePlanner()
    named_errors = partial(explained, world, what)
    silence_one_process()
    with named_errors():
        if not asynchronous:
            write(tree, storage_writer=writer, planner=planner)
            return PendingCheckpoint(path, None, named_errors)
        group = _background_group(world)
        written: Any = async_save(tree, storage_writer=writer, planner=planner, process_group=group)
    return PendingCheckpoint(path, written, named_errors)


def load(path: Path, contents: Contents, world: World) -> None:
    """See `wholestep.load_checkpoint`."""
    finish_pending()
    what = f"loading {path}"
    folder, metadata = on_all_ranks(world, what, partial(_opened, path))
    lags = f"{path} holds another checkpoint for rank {world.rank} than for rank 0: its file system lags, or is another"
    on_all_ranks(world, what, partial(check_same, world, _id_of(metadata), f"{lags}."))
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


def _prepared(path: Path, contents: Contents, world: World) -> dict[str, Any]:
    try:
        if world.rank == 0:
            tidy(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {type(error).__name__}: {error}.") from error
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


def _id_of(metadata: Metadata) -> str:
    return str(metadata.storage_meta.save_id if metadata.storage_meta is not None else None)


def _background_group(world: World) -> Any:
    """Ranks speak of the checkpoint over it in another thread, so no message of the training may go that way."""
    if world.size == 1:
        return None
    if not dist.is_gloo_available():
        raise ConfigError("save_checkpoint(asynchronous=True) wants gloo, which this build of torch has not.")
    if not _background or _background[0][0] is not world:
        _background[:] = [(world, dist.new_group(backend="gloo"))]
    return _background[0][1]
