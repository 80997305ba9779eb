"""Checkpoints: what a training holds goes into a folder and comes back, under any strategy and number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from wholestep.api.compiled_step import CompiledStep
from wholestep.errors import ConfigError
from wholestep.runtime.checkpoint.pending import PendingCheckpoint, finish_pending
from wholestep.runtime.distributed import nccl_connect
from wholestep.runtime.distributed.world import init
from wholestep.runtime.sharding.materialize import Initialize
from wholestep.util.lazy_import import lazy_import

if TYPE_CHECKING:
    from wholestep.runtime.checkpoint import contents, safetensors_files, save_and_load
    from wholestep.runtime.checkpoint.contents import HasState, Optimizers
    from wholestep.runtime.checkpoint.models import Models
    from wholestep.runtime.checkpoint.safetensors_files import Rename
else:  # torch's checkpoints take half a second to import, which most processes that start warm need not spend
    contents = lazy_import("wholestep.runtime.checkpoint.contents")
    safetensors_files = lazy_import("wholestep.runtime.checkpoint.safetensors_files")
    save_and_load = lazy_import("wholestep.runtime.checkpoint.save_and_load")


def save_checkpoint(
    path: str | Path,
    model: Models,
    optimizer: Optimizers | None = None,
    step: CompiledStep | None = None,
    *,
    extra: Mapping[str, HasState] | None = None,
    asynchronous: bool = False,
) -> PendingCheckpoint:
    """Saves a training into a folder, which replaces the one before in one piece. All ranks call it, between steps.

    Every rank writes its own part of what is sharded; what is whole is divided among them. A process that is killed at
    any moment leaves the last whole checkpoint loadable.

    Args:
        path: the folder, on a file system that all ranks share. It holds nothing but the checkpoint.
        model: one module, or several by name in a dict or in a list; sharded or whole.
        optimizer: one, or several; None: none. Their numbers, such as rates, are saved with their state.
        step: the compiled step, for what it has of its own: the number of calls, the memory of `PowerSGD`, and where
            the random generators of each rank stand (torch's on CPU and GPU, Python's, numpy's).
        extra: other things that have a state, by name: schedulers, scalers. That of rank 0 is saved.
        asynchronous: copy all to memory of the host and return; a thread writes it. The next save or load waits for
            that, and raises what went wrong, as `PendingCheckpoint.result` does.

    Returns:
        Its `result()` is the folder, once it is written.

    Raises:
        ConfigError: arguments that cannot be saved, such as a parameter that no model has.
        CheckpointError: the folder cannot be written or holds something else; the checkpoint before is untouched.
        RankMissingError: a rank did not come, or died.
    """
    objects = _contents(model, optimizer, step, extra)
    nccl_connect.wait()
    return save_and_load.save(Path(path).resolve(), objects, init(), asynchronous=asynchronous)


def load_checkpoint(
    path: str | Path,
    model: Models,
    optimizer: Optimizers | None = None,
    step: CompiledStep | None = None,
    *,
    extra: Mapping[str, HasState] | None = None,
) -> None:
    """Loads a checkpoint into a training, saved under any strategy and number of ranks. All ranks call it.

    Tensors are read in place, each rank its own parts of them, so a step that was called is not captured again. Call it
    before the first call of a step or between calls. Under `FSDP` a model that no rank can hold is sharded before
    (`wholestep.shard`). Under `ZeRO` new state of optimizers is read in parts if `step` is given.

    Nothing in the folder runs: values are read by ``torch.load(weights_only=True)`` and an unpickler that knows the
    records of the format alone.

    Args:
        path, model, optimizer, step, extra: as they were saved, in the same form; what is left out is not loaded. A
            step goes on counting, compressing and drawing where it was. With another number of ranks a rank takes the
            generators of the saved rank of its number (ranks beyond those begin at seeds made of the saved states),
            and errors of `PowerSGD` begin at zero.

    Raises:
        ConfigError: arguments that nothing can be loaded into, such as a model on the meta device.
        CheckpointError: there is no whole checkpoint, or it is of another model or other groups of parameters. Nothing
            has been changed then. Where a file cannot be read to its end it says so, and values may be mixed.
        RankMissingError: a rank did not come, or died.
    """
    objects = _contents(model, optimizer, step, extra)
    nccl_connect.wait()
    save_and_load.load(Path(path).resolve(), objects, init())


def load_safetensors(path: str | Path, model: nn.Module, *, rename: Rename | None = None, strict: bool = True) -> None:
    """Loads values from safetensors, as Hugging Face writes them, into a model: whole, or sharded. All ranks call it.

    Each rank reads the parts of a tensor that it holds, one after the other, and casts them to the types of the model.

    Args:
        path: a file, an index (``model.safetensors.index.json``), or a folder that holds one of them.
        model: has memory already; for one on the meta device see `from_safetensors`.
        rename: the name in the files of what the model calls so; by default the same.
        strict: whether a name that only the files have, or only the model, is an error. Tied parameters need one name.

    Raises:
        ConfigError: the library safetensors is not installed, or the model is on the meta device.
        CheckpointError: there are no such files, or they do not fit the model. Nothing has been changed then.
    """
    nccl_connect.wait()
    finish_pending()
    safetensors_files.load(Path(path).resolve(), model, init(), rename or str, strict=strict)


def from_safetensors(
    path: str | Path, model: nn.Module, *, rename: Rename | None = None, otherwise: Initialize | None = None
) -> Initialize:
    """What gives a model on the meta device the values of safetensors: ``ws.shard(model, initialize=...)``.

    Modules are made one by one, so no rank holds more than one unit and one tensor whole.

    Args:
        path, rename: as `load_safetensors` has them.
        model: the one that will be sharded.
        otherwise: called for each module before, to set what the files do not have; by default its
            ``reset_parameters``, if it has one. What then is still not set is named in an error of `shard`.

    Raises:
        ConfigError: the library safetensors is not installed.
        CheckpointError: here where there are no such files, in `shard` for a tensor of another shape.
    """
    return safetensors_files.initializer(Path(path).resolve(), model, rename or str, otherwise)


def _contents(
    model: Models, optimizer: Optimizers | None, step: CompiledStep | None, extra: Mapping[str, HasState] | None
) -> contents.Contents:
    if step is not None and not isinstance(step, CompiledStep):
        raise ConfigError(f"A checkpoint wants a step that wholestep.compile has made, got a {type(step).__name__}.")
    if step is not None and step.is_method_of_many:
        raise ConfigError("A checkpoint wants the step of one instance, such as trainer.train_step, got the class's.")
    return contents.Contents(model, optimizer, step, extra or {})
