"""Puts sharded parameters in the place of whole ones, wherever Python holds those.

[Note: who holds a parameter]
Modules, optimizers and lists of the user do, and some of them no step can reach: an optimizer that is stepped outside,
a list for clipping. Python's collector knows all holders. In lists, dicts, attributes and closures the new object takes
the place of the old one, weak references included, and the state that an optimizer has under it is cut. What stays are
variables of running functions, tuples and sets: the old parameter that they hold says at its first use that it was
replaced.
"""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from wholestep.errors import PlacementError
from wholestep.ir.dtensor.shards import cut, is_sharded


class ReplacedParameter(nn.Parameter):
    """A parameter that has given its place to a sharded one, and its memory back. Every use of it is an error."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raises PlacementError."""
        raise PlacementError(
            "This parameter was replaced when its model was sharded: a variable, a tuple or a set still holds the old "
            "one. Take it from the model again, or shard the model before (wholestep.shard)."
        )


def replace_everywhere(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Has everything hold the second of each pair that holds the first one, which becomes a `ReplacedParameter`."""
    new_of: dict[int, Any] = {id(old): new for old, new in pairs}
    weak = [(ref, weakref.ref(new)) for old, new in pairs for ref in weakref.getweakrefs(old) if _is_plain(ref)]
    new_of |= {id(ref): new for ref, new in weak}
    for holder in gc.get_referrers(*(old for old, _ in pairs), *(ref for ref, _ in weak)):
        if isinstance(holder, list):
            _replace_in_list(holder, new_of)
        elif isinstance(holder, dict):
            _replace_in_dict(holder, new_of)
        elif isinstance(holder, types.CellType):
            holder.cell_contents = new_of.get(id(holder.cell_contents), holder.cell_contents)
        elif not isinstance(holder, (tuple, set, frozenset, types.FrameType)) and hasattr(holder, "__dict__"):
            _replace_in_dict(vars(holder), new_of)  # its attributes had no dict of their own so far
    for old, _ in pairs:
        with torch.no_grad():
            old.grad = None
            old.data = torch.empty(0, dtype=old.dtype, device=old.device)
        old.__class__ = ReplacedParameter


def _is_plain(ref: Any) -> bool:
    return type(ref) is weakref.ref and ref.__callback__ is None


def cut_state(param: torch.Tensor, held: dict[Any, Any], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> None:
    """Cuts the state that an optimizer keeps of a parameter, in place: what has the shape of the parameter."""
    for key, value in held.items():
        is_plain = isinstance(value, torch.Tensor) and not is_sharded(value)
        if is_plain and value.dim() > 0 and value.shape == param.shape:
            held[key] = cut(value, mesh, placements)


def _replace_in_list(holder: list[Any], new_of: dict[int, Any]) -> None:
    for place, held in enumerate(holder):
        if id(held) in new_of:
            holder[place] = new_of[id(held)]


def _replace_in_dict(holder: dict[Any, Any], new_of: dict[int, Any]) -> None:
    for key, held in list(holder.items()):
        if id(held) in new_of:
            holder[key] = new_of[id(held)]
    if any(id(key) in new_of for key in holder):  # keys keep their order
        items = list(holder.items())
        holder.clear()
        for key, held in items:
            new = new_of.get(id(key))
            if isinstance(new, DTensor) and isinstance(held, dict):
                cut_state(new, held, new.device_mesh, new.placements)
            holder[key if new is None else new] = held
