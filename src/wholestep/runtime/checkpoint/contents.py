"""What is in a checkpoint, as a tree of names: what is saved of live objects, and where each saved value goes.

    model.<name>                      tensors of the model; of several, model.<model>.<name>
    optimizer.state.<name>.<key>      state of a parameter; of several optimizers, optimizer.<optimizer>.state...
    optimizer.param_groups.<n>.<key>  rates and other numbers
    extra.<name>                      state of something else, as bytes
    step.calls, step.ranks            of the compiled step, and of how many ranks it was
    step.rank.<r>.random, .compression

Names are those of torch's ``get_model_state_dict`` and ``get_optimizer_state_dict``.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from wholestep.errors import CheckpointError, ConfigError
from wholestep.runtime.checkpoint import optimizers as optimizer_states
from wholestep.runtime.checkpoint import random_state
from wholestep.runtime.checkpoint.models import Models, NamedModels, named
from wholestep.runtime.checkpoint.optimizers import LayoutOf, cut_like_parameter, new_tensor
from wholestep.runtime.checkpoint.storage import check_loadable
from wholestep.runtime.distributed.world import World

Optimizers = Optimizer | Mapping[str, Optimizer] | Sequence[Optimizer]
"""One optimizer, or several by name or in a row."""

KeyPath = tuple[str | int, ...]
_ABSENT = object()


@runtime_checkable
class HasState(Protocol):
    """Something that gives its state and takes it again, such as a learning rate scheduler or a scaler of gradients."""

    def state_dict(self) -> dict[str, Any]:
        """Its state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Goes on from a state."""


class StepState(Protocol):
    """What a compiled step has of its own."""

    @property
    def calls(self) -> int:
        """How many calls it has run."""

    def resume_at(self, calls: int) -> None:
        """Goes on counting there."""

    def state_dict(self) -> dict[str, Any]:
        """The memory of compressed gradients; {} if it compresses none."""

    def load_memory(self, memory: dict[str, Any]) -> None:
        """Goes on from such a memory, if it compresses gradients."""

    def state_layout(self) -> LayoutOf:
        """How its strategy cuts new state of optimizers."""


class Contents:
    """The objects that one checkpoint is saved of, or loaded into."""

    def __init__(
        self,
        models: Models,
        optimizers: Optimizers | None,
        step: StepState | None,
        extra: Mapping[str, HasState],
    ) -> None:
        """Raises ConfigError for arguments of the wrong kind."""
        self._models = NamedModels(models)
        self._has_one_optimizer = isinstance(optimizers, Optimizer)
        self._optimizers = {} if optimizers is None else named(optimizers, Optimizer, "optimizer")
        self._step = step
        for name, one in extra.items():
            if not isinstance(one, HasState) or isinstance(one, (nn.Module, Optimizer)):
                raise ConfigError(
                    f"extra[{name!r}] is a {type(one).__name__} and wants to be something small with state_dict() and "
                    f"load_state_dict(), such as a learning rate scheduler. Models and optimizers are arguments of "
                    f"their own, which take several."
                )
        self._extra = extra

    def tree(self, world: World) -> dict[str, Any]:
        """All that is saved: tensors are the live ones. Raises CheckpointError for what could not be loaded again."""
        tree = self._live()
        if self._extra:
            tree["extra"] = {name: _as_bytes(name, one.state_dict()) for name, one in self._extra.items()}
        if self._step is not None:
            own = {"random": random_state.state(world.device), "compression": self._step.state_dict()}
            tree["step"] = {"calls": self._step.calls, "ranks": world.size, "rank": {str(world.rank): own}}
        _check_keys(tree, ())
        return tree

    def values_to_read(self, metadata: Metadata, world: World, num_saved_ranks: int) -> dict[str, KeyPath]:
        """Names of what this rank reads of a checkpoint, with their paths.

        Raises CheckpointError for a checkpoint that has not all of it.
        """
        paths: dict[str, KeyPath] = metadata.planner_data or {}
        wanted = {"model"} | ({"optimizer"} if self._optimizers else set())
        wanted |= ({"extra"} if self._extra else set()) | ({"step"} if self._step is not None else set())
        parts = [(part,) for part in wanted - {"extra"}] + [("extra", name) for name in self._extra]
        saved = {path[:length] for path in paths.values() for length in (1, 2)}
        absent = [" ".join(part) for part in parts if part not in saved]
        if absent:
            raise CheckpointError(f"nothing of {' and '.join(sorted(absent))} was saved, so load it without")
        all_ranks = num_saved_ranks != world.size
        return {
            name: path
            for name, path in paths.items()
            if path[0] in wanted
            and (path[0] != "extra" or path[1] in self._extra)
            and (path[:2] != ("step", "rank") or all_ranks or path[2] == str(world.rank))
        }

    def targets(self, metadata: Metadata, paths: Mapping[str, KeyPath]) -> dict[str, Tensor]:
        """Where the tensors among the values that are read go: live ones where they fit, else new ones.

        Raises CheckpointError for a model that is another one than that of the checkpoint.
        """
        live = self._live()
        layout = self._step.state_layout() if self._step is not None else cut_like_parameter
        found: dict[str, Tensor] = {}
        faults: list[str] = []
        for name, path in paths.items():
            record = metadata.state_dict_metadata[name]
            now = _at(live, path)
            if path[0] == "model" and now is _ABSENT:
                faults.append(f"{name} is only in the checkpoint")
            if not isinstance(record, TensorStorageMetadata):
                continue
            if isinstance(now, Tensor) and now.shape == record.size:
                found[name] = now
            elif path[0] == "model" and isinstance(now, Tensor):
                faults.append(f"{name} is {[*now.shape]} here and {[*record.size]} in the checkpoint")
            else:
                found[name] = self._new(path, record, layout)
        saved = {path for path in paths.values() if path[0] == "model"}
        faults += [f"{'.'.join(map(str, path))} is only here" for path in _paths(live["model"], ("model",)) - saved]
        if faults:
            raise CheckpointError(f"it is of another model: {'; '.join(sorted(faults)[:6])}")
        return found

    def check(self, tree: dict[str, Any]) -> None:
        """Raises CheckpointError where what was read, but for tensors, is of other optimizers."""
        for name, optimizer in self._optimizers.items():
            saved = self._of(tree, name)
            if "param_groups" not in saved:
                raise CheckpointError(f"it holds nothing of optimizer {name!r}, but of {sorted(tree['optimizer'])}")
            optimizer_states.check_groups(optimizer, saved, self._models.names(), type(optimizer).__name__)

    def load(self, tree: dict[str, Any], metadata: Metadata, world: World) -> None:
        """Gives all objects what was read. Random numbers last: to load something else may draw some."""
        self._models.load(tree["model"])
        for name, optimizer in self._optimizers.items():
            is_kept = _has_type_of(metadata, self._models.parameters)
            optimizer_states.load(optimizer, self._of(tree, name), self._models.names(), is_kept)
        for name, one in self._extra.items():
            one.load_state_dict(torch.load(io.BytesIO(bytes(tree["extra"][name].numpy())), weights_only=True))
        if self._step is not None:
            self._load_step(self._step, tree["step"], world)

    def _load_step(self, step: StepState, saved: dict[str, Any], world: World) -> None:
        step.resume_at(saved["calls"])
        by_rank = saved["rank"]
        is_same = saved["ranks"] == world.size
        memory = by_rank[str(world.rank if is_same else 0)].get("compression", {})
        empty: dict[str, Any] = {"calls": 0, "draws": 0, "tensors": {}}
        kept = memory if is_same else {key: one for key, one in memory.items() if key != "tensors"}
        step.load_memory({**empty, **kept})
        states = [by_rank[str(rank)]["random"] for rank in range(saved["ranks"])] if not is_same else []
        own = by_rank[str(world.rank)]["random"] if is_same else random_state.for_rank(states, world.rank)
        random_state.restore(own, world.device)

    def _live(self) -> dict[str, Any]:
        names = self._models.names()
        tree: dict[str, Any] = {"model": self._models.state()}
        states = {name: optimizer_states.named_state(one, names) for name, one in self._optimizers.items()}
        if states:
            tree["optimizer"] = next(iter(states.values())) if self._has_one_optimizer else states
        return tree

    def _of(self, tree: dict[str, Any], name: str) -> dict[str, Any]:
        """The part of a tree that is of one optimizer."""
        found: dict[str, Any] = tree["optimizer"] if self._has_one_optimizer else tree["optimizer"].get(name, {})
        return found

    def _new(self, path: KeyPath, record: TensorStorageMetadata, layout: LayoutOf) -> Tensor:
        inner = path[1:] if self._has_one_optimizer else path[2:]
        is_state = path[0] == "optimizer" and len(inner) > 2 and inner[0] == "state"
        param = self._models.parameters.get(str(inner[1])) if is_state else None
        cut = layout(str(inner[1]), param) if param is not None else None
        return new_tensor(param, cut, record.size, record.properties.dtype)


def _has_type_of(metadata: Metadata, params: Mapping[str, Tensor]) -> Callable[[str], bool]:
    def is_same(name: str) -> bool:
        record = metadata.state_dict_metadata.get(f"model.{name}")
        return isinstance(record, TensorStorageMetadata) and record.properties.dtype == params[name].dtype

    return is_same


def _as_bytes(name: str, state: dict[str, Any]) -> Tensor:
    written = io.BytesIO()
    torch.save(state, written)
    check_loadable(f"extra.{name}", state, written)
    return torch.frombuffer(bytearray(written.getvalue()), dtype=torch.uint8)


def _check_keys(tree: Any, path: KeyPath) -> None:
    if isinstance(tree, Mapping):
        wrong = next((key for key in tree if not isinstance(key, str)), None)
        if wrong is not None:
            raise CheckpointError(
                f"{'.'.join(map(str, path))} has the key {wrong!r}, a {type(wrong).__name__}. Checkpoints know values "
                f"by text: only dicts with text for keys can be saved."
            )
    for key, inside in tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else ():
        _check_keys(inside, (*path, key))


def _at(tree: Any, path: KeyPath) -> Any:
    for key in path:
        if isinstance(tree, Mapping):
            tree = tree.get(key, _ABSENT)
        elif isinstance(tree, list) and isinstance(key, int) and key < len(tree):
            tree = tree[key]
        else:
            return _ABSENT
    return tree


def _paths(tree: Any, path: KeyPath) -> set[KeyPath]:
    """Paths of the leaves of a tree of dicts."""
    if not isinstance(tree, Mapping):
        return {path}
    return {found for key, inside in tree.items() for found in _paths(inside, (*path, key))}
