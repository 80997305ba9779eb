"""The state of optimizers by names of parameters, and back, with all objects of a live optimizer kept.

The form is that of torch's ``get_optimizer_state_dict``. That function itself takes a step with gradients of zeros
where an optimizer has no state, which would leave a counter at 1 after a save, and hold all state whole before a load.

[Note: objects are kept]
``Optimizer.load_state_dict`` puts new dicts and tensors in the place of those that a compiled step is bound to, which
would be captured again. So values are read into live tensors; dicts get new contents, and stay the objects they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer

from wholestep.errors import CheckpointError, ConfigError
from wholestep.ir.dtensor.shards import is_sharded, zero_shard

Layout = tuple[DeviceMesh, tuple[Placement, ...]]
"""Over which mesh, and how, a tensor is cut."""

LayoutOf = Callable[[str, Tensor], Layout | None]
"""How state of the shape of a parameter is cut, by the parameter's name; None: it is whole."""


def cut_like_parameter(name: str, param: Tensor) -> Layout | None:
    """The layout of optimizer state that follows its parameter."""
    return (param.device_mesh, param.placements) if is_sharded(param) else None


def named_state(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """The live state of an optimizer. `names`: of parameters, by their ids.

    Raises ConfigError for parameters that no model has.
    """
    by_number = _names_by_number(optimizer, names)
    held = optimizer.state_dict()
    state = {by_number.get(key, key): value for key, value in held["state"].items()}
    groups = [{**group, "params": [by_number[number] for number in group["params"]]} for group in held["param_groups"]]
    return {**held, "state": state, "param_groups": groups}


def load(optimizer: Optimizer, saved: dict[str, Any], names: Mapping[int, str], is_kept: Callable[[str], bool]) -> None:
    """Gives an optimizer the state that was read, some of it into tensors that it has.

    Args:
        saved: as `named_state` gives it, its groups those of the optimizer (`check_groups`).
        is_kept: whether new state of a parameter keeps its type, by the parameter's name. torch casts it to that of
            the parameter.
    """
    by_number = _names_by_number(optimizer, names)
    number_of = {name: number for number, name in by_number.items()}
    state = {number_of.get(key, key): value for key, value in saved.get("state", {}).items()}
    pairs = zip(saved["param_groups"], optimizer.state_dict()["param_groups"], strict=True)
    groups = [{**group, "params": now["params"]} for group, now in pairs]
    before: Any = (optimizer.state, optimizer.param_groups)
    in_place = {id(tensor) for tensor in _tensors(before)}
    optimizer.load_state_dict({**saved, "state": state, "param_groups": groups})
    for param, number in zip((p for group in optimizer.param_groups for p in group["params"]), by_number, strict=True):
        if is_kept(by_number[number]):
            _undo_cast(optimizer.state.get(param, {}), state.get(number, {}))
    after = (optimizer.state, optimizer.param_groups)
    with torch.no_grad():
        optimizer.state, optimizer.param_groups = map(_with_contents, before, after, (in_place, in_place))


def check_groups(optimizer: Optimizer, saved: dict[str, Any], names: Mapping[int, str], what: str) -> None:
    """Raises CheckpointError where the groups of a checkpoint hold other parameters than those of an optimizer."""
    by_number = _names_by_number(optimizer, names)
    ours = [{by_number[number] for number in group["params"]} for group in optimizer.state_dict()["param_groups"]]
    theirs = [set(group["params"]) for group in saved["param_groups"]]
    if len(ours) != len(theirs):
        raise CheckpointError(f"{what} has {len(ours)} parameter groups, and in the checkpoint {len(theirs)}")
    for number, (here, there) in enumerate(zip(ours, theirs, strict=True)):
        if here != there:
            only = [f"{name} only here" for name in sorted(here - there)]
            only += [f"{name} only there" for name in sorted(there - here)]
            raise CheckpointError(
                f"group {number} of {what} does not hold the parameters that it holds in the checkpoint: "
                f"{', '.join(only[:4])}"
            )


def new_tensor(param: Tensor | None, layout: Layout | None, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Where state that an optimizer does not have yet is read to: cut, or whole; single numbers on the CPU.

    `param`: whose state it is, if it is that of a parameter.
    """
    if param is None or not shape:
        return torch.empty(shape, dtype=dtype)
    if layout is not None and shape == param.shape:
        return zero_shard(shape, dtype, param.device, *layout)
    if shape == param.shape and not isinstance(param, DTensor):
        return torch.empty_like(param, dtype=dtype, requires_grad=False)  # with its strides
    return torch.empty(shape, dtype=dtype, device=param.device)


def _names_by_number(optimizer: Optimizer, names: Mapping[int, str]) -> dict[int, str]:
    """The names of parameters by the numbers under which torch saves their state."""
    params = [(g, p) for g, group in enumerate(optimizer.param_groups) for p in group["params"]]
    unknown = next((f"a parameter of shape {[*p.shape]} in group {g}" for g, p in params if id(p) not in names), None)
    if unknown is not None:
        raise ConfigError(
            f"{type(optimizer).__name__} holds {unknown} that no model has, so it has no name in a checkpoint. Pass "
            f"what holds it among the models: model={{'net': net, 'loose': torch.nn.ParameterList([...])}}."
        )
    return {number: names[id(param)] for number, (_, param) in enumerate(params)}


def _undo_cast(held: Any, read: Any) -> None:
    for key, value in read.items() if isinstance(held, dict) else ():
        now = held.get(key)
        if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
            held[key] = value.to(now.device)


def _with_contents(old: Any, new: Any, in_place: Set[int]) -> Any:
    """`old` with the contents of `new`, where that can be; tensors that were read into stay."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [key for key in old if key not in new]:
            del old[key]
        old.update({key: _with_contents(old.get(key), value, in_place) for key, value in new.items()})
        return old
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        old[:] = [_with_contents(a, b, in_place) for a, b in zip(old, new, strict=True)]
        return old
    if isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new):
        inside = [_with_contents(a, b, in_place) for a, b in zip(old, new, strict=True)]
        return old if all(a is b for a, b in zip(old, inside, strict=True)) else new
    if not (isinstance(old, Tensor) and isinstance(new, Tensor)) or old.shape != new.shape:
        return new
    if id(old) in in_place:  # it has its values
        return old
    return old.copy_(new) if old.dtype == new.dtype else new


def _tensors(tree: Any) -> list[Tensor]:
    """Those that values are read into: a tuple is one value, and is read whole."""
    if isinstance(tree, Tensor):
        return [tree]
    inside = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return [tensor for one in inside for tensor in _tensors(one)]
