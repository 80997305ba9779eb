"""Gives modules on the meta device memory and values, a unit at a time: no rank ever holds a whole model.

[Note: the same for every world size]
Every module is initialised whole, under a seed that is made of its name and of rank 0's seed, before it is cut. So
numbers depend neither on the number of ranks nor on the order in which units are made.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from wholestep.errors import PlacementError

Initialize = Callable[[nn.Module], Any]
"""Sets the parameters and buffers that a module has itself, those of its children not."""


def is_on_meta(root: nn.Module) -> bool:
    """Whether any parameter or buffer has no memory yet."""
    return any(one.is_meta for one in (*root.parameters(), *root.buffers()))


def check_initializers(root: nn.Module, name: str) -> None:
    """Raises PlacementError for a module on the meta device that cannot initialise itself. Changes nothing."""
    unable = [
        f"{fqn or name} ({type(module).__name__})"
        for fqn, module in root.named_modules()
        if _own_meta(module) and reset_method(module) is None
    ]
    if unable:
        raise PlacementError(
            f"{', '.join(unable)}: on the meta device, with parameters or buffers of its own and no reset_parameters() "
            f"that could set them. Give the class that method, or pass a function that sets them for a module: "
            f"wholestep.shard(model, initialize=...)."
        )


def materialize(
    root: nn.Module, unit: nn.Module, device: torch.device, seed: int, initialize: Initialize | None = None
) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Makes and initialises all of `unit` that has no memory yet.

    Args:
        root: names of its modules make the seeds.
        seed: the same on all ranks.
        initialize: called for each module that has something on the meta device itself; None: ``reset_parameters``.

    Returns:
        Pairs of a parameter on the meta device and the new one.

    Raises:
        PlacementError: where something was not set. The model has to be built again then.
    """
    names = {module: name for name, module in root.named_modules()}
    owners = [module for module in unit.modules() if _own_meta(module)]
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in owners:
        _make(module, device, made)
    for module in owners:
        set_values = reset_method(module) if initialize is None else functools.partial(initialize, module)
        assert set_values is not None  # `check_initializers` has looked
        with _seeded(seed, names[module], device), torch.no_grad(), device:
            set_values()
    for module in owners:
        left = [name for name, one in _own(module) if _has_poison(one)]
        if left:
            raise PlacementError(
                f"{names[module] or type(module).__name__}: {', '.join(left)} was not set when the module was "
                f"initialised. Let its reset_parameters(), or initialize=, set all that it has, and build the model "
                f"again."
            )
    return list(made.items())


def _own(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    held = (*module._parameters.items(), *module._buffers.items())
    return ((name, one) for name, one in held if one is not None)


def _own_meta(module: nn.Module) -> bool:
    return any(one.is_meta for _, one in _own(module))


def reset_method(module: nn.Module) -> Callable[[], Any] | None:
    """The method under which torch's modules, and those written like them, set what they have."""
    found: Any = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return found if callable(found) else None


def _make(module: nn.Module, device: torch.device, made: dict[nn.Parameter, nn.Parameter]) -> None:
    for name, param in module._parameters.items():
        if param is not None and param.is_meta:
            if param not in made:
                new = nn.Parameter(_poisoned(param, device), requires_grad=param.requires_grad)
                vars(new).update(vars(param))
                made[param] = new
            module._parameters[name] = made[param]
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = _poisoned(buffer, device)


def _poison(dtype: torch.dtype) -> float | int:
    """A value that no initialisation gives: what still holds it was not set."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0 if dtype is torch.bool else torch.iinfo(dtype).max


def _poisoned(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(like.detach(), device=device).fill_(_poison(like.dtype))


def _has_poison(tensor: torch.Tensor) -> bool:
    if tensor.dtype is torch.bool or tensor.is_meta:
        return False
    is_float = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    left = tensor.detach().isnan() if is_float else tensor == _poison(tensor.dtype)
    return bool(left.any())


@contextlib.contextmanager
def _seeded(seed: int, name: str, device: torch.device) -> Iterator[None]:
    """While open, random numbers are those of a name."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed((seed + zlib.crc32(name.encode())) % 2**63)
        yield
