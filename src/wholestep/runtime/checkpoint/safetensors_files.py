"""Files of safetensors, as Hugging Face writes them: read a part at a time into what lives already."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as read

from wholestep.errors import CheckpointError, ConfigError
from wholestep.runtime.checkpoint.models import NamedModels
from wholestep.runtime.checkpoint.storage import LoadPlanner, silence_one_process
from wholestep.runtime.checkpoint.together import explained, on_all_ranks
from wholestep.runtime.distributed.world import World
from wholestep.runtime.sharding.materialize import Initialize, reset_method

SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"

Rename = Callable[[str], str]
"""The name in the files of what the model calls so."""


def files_of(path: Path) -> list[Path]:
    """The files that a path means: one of safetensors, those of an index, or all of a folder.

    Raises CheckpointError where there are none.
    """
    if path.is_dir():
        indices = sorted(path.glob(f"*{INDEX_SUFFIX}"))
        return files_of(indices[0]) if len(indices) == 1 else _existing(sorted(path.glob(f"*{SUFFIX}")), path)
    if path.name.endswith(".json"):
        try:
            named = json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{path} is no index of safetensors ({type(error).__name__}: {error}).") from error
        return _existing([path.parent / name for name in sorted(set(named))], path)
    return _existing([path], path)


def _existing(files: list[Path], path: Path) -> list[Path]:
    missing = [str(file) for file in files if not file.is_file()]
    if missing or not files:
        what = f"{', '.join(missing[:3])} is not there" if missing else "it has no files of safetensors"
        raise CheckpointError(f"{path} cannot be loaded: {what}.")
    return files


class _Chosen(FileSystem):
    """A file system in which a folder has some files only."""

    def __init__(self, files: list[Path]) -> None:
        super().__init__()
        self._files = [str(file) for file in files]

    def ls(self, path: Any) -> list[str]:
        """Those files."""
        return self._files


def load(path: Path, model: nn.Module, world: World, rename: Rename, *, strict: bool) -> None:
    """See `wholestep.load_safetensors`."""
    what = f"loading {path}"

    def prepared() -> tuple[HuggingFaceStorageReader, dict[str, Tensor]]:
        _check_library()
        files = files_of(path)
        reader = HuggingFaceStorageReader(str(files[0].parent))
        reader.fs = _Chosen(files)
        return reader, _targets(path, model, reader.read_metadata().state_dict_metadata, rename, strict=strict)

    reader, targets = on_all_ranks(world, what, prepared)
    silence_one_process()
    with explained(world, what):
        read(dict(targets), storage_reader=reader, planner=LoadPlanner())


def _targets(
    path: Path, model: nn.Module, records: Mapping[str, Any], rename: Rename, *, strict: bool
) -> dict[str, Tensor]:
    """What the model has, by the names in the files. Raises CheckpointError for what does not fit."""
    state = {name: one for name, one in NamedModels(model).state().items() if isinstance(one, Tensor)}
    targets = {rename(name): one for name, one in state.items() if rename(name) in records}
    loaded = {name for name in state if rename(name) in records}
    covered = {name for names in _tied(model) if names & loaded for name in names} | loaded
    faults = [
        f"{rename(name)} is {[*records[rename(name)].size]} in the files and {[*state[name].shape]} in the model"
        for name in sorted(loaded)
        if isinstance(records[rename(name)], TensorStorageMetadata) and records[rename(name)].size != state[name].shape
    ]
    if strict:
        faults += [f"the files have no {rename(name)}" for name in state if name not in covered]
        faults += [f"the model has no {name}" for name in sorted(set(records) - set(targets))]
    if faults:
        more = f"; and {len(faults) - 6} more" if len(faults) > 6 else ""
        help_ = " rename= gives names in the files; strict=False loads what both have." if strict else ""
        raise CheckpointError(f"{path} does not fit the model: {'; '.join(faults[:6])}{more}.{help_}")
    return targets


def _tied(model: nn.Module) -> list[set[str]]:
    """Names of one and the same parameter or buffer."""
    names: dict[int, set[str]] = {}
    for name, one in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        names.setdefault(id(one), set()).add(name)
    return list(names.values())


def initializer(path: Path, model: nn.Module, rename: Rename, otherwise: Initialize | None) -> Initialize:
    """See `wholestep.from_safetensors`."""
    _check_library()
    from safetensors import safe_open

    file_of: dict[str, Path] = {}
    for file in files_of(path):
        with safe_open(file, framework="pt") as opened:
            file_of.update(dict.fromkeys(opened.keys(), file))
    in_files = {
        name: next((rename(one) for one in (name, *sorted(names)) if rename(one) in file_of), None)
        for names in _tied(model)
        for name in names
    }
    prefixes = {module: f"{name}." if name else "" for name, module in model.named_modules()}
    return partial(_initialize, prefixes, in_files, file_of, otherwise)


def _initialize(
    prefixes: Mapping[nn.Module, str], in_files: Mapping[str, str | None], file_of: Mapping[str, Path],
    otherwise: Initialize | None, module: nn.Module,
) -> None:  # fmt: skip
    from safetensors import safe_open

    set_others = partial(otherwise, module) if otherwise is not None else reset_method(module)
    if set_others is not None:
        set_others()
    own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    for name, one in own:
        saved = in_files.get(f"{prefixes[module]}{name}")
        if saved is not None:
            with safe_open(file_of[saved], framework="pt") as opened, torch.no_grad():
                value = opened.get_tensor(saved)
                if value.shape != one.shape:
                    raise CheckpointError(
                        f"{saved} is {[*value.shape]} in {file_of[saved]} and {[*one.shape]} in the model."
                    )
                one.copy_(value)


def _check_library() -> None:
    if importlib.util.find_spec("safetensors") is None:
        raise ConfigError("Files of safetensors are read by the library safetensors: install it.")
