"""Gradients of the parameters that FSDP leaves whole, in eager code: they are reduced like those that are cut.

``fully_shard`` knows nothing of a parameter without dims, or of one that is not contiguous. In a step, compiled or
live, the strategy reduces their gradients. An eager backward between two calls would leave each rank its own.

[Note: why the node and not the tensor]
A hook on a tensor is the user's to see, and belongs to a trace. The node that accumulates a gradient belongs to the
memory of the parameter, which a trace exchanges for a fake: there nothing is reduced twice.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge

from wholestep.capture.wrappers.fully_shard_hooks import keep_with, kept_with, reduces_by_itself
from wholestep.capture.wrappers.fully_shard_settings import sharded_modules, waits_for_more
from wholestep.config import FSDP
from wholestep.ir.dtensor.shards import is_sharded
from wholestep.ir.ops.collectives import group_named
from wholestep.ir.program import MeshAxis


def reduce_whole(root: nn.Module, ignored: Iterable[torch.Tensor], config: FSDP, axes: tuple[MeshAxis, ...]) -> None:
    """From now on an eager backward reduces gradients of the parameters of `root` that are whole.

    Args:
        root: a sharded module. After a change of a dtype, which gives parameters another node, call it again.
        ignored: parameters whose gradients stay local.
        axes: those over which the strategy reduces.
    """
    holder = next(iter(sharded_modules([root])), None)
    left = {id(one) for one in ignored}
    whole = [one for one in root.parameters() if not is_sharded(one) and not one.is_meta and id(one) not in left]
    if holder is None or not whole:
        return
    known, nodes = kept_with(holder) or [], [_node(param) for param in whole if param.is_floating_point()]
    for node in nodes:
        if not any(node is one for one in known):
            node.register_prehook(_Reduction(weakref.ref(root), config.reduce == "mean", axes))
    keep_with(holder, nodes)


def _node(param: torch.Tensor) -> Any:
    """What accumulates the gradient of a parameter, also of one that does not train now."""
    trains = param.requires_grad
    try:
        return get_gradient_edge(param.requires_grad_()).node
    finally:
        param.requires_grad_(trains)


class _Reduction:
    """What happens to one gradient before its accumulation."""

    def __init__(self, root: weakref.ref[nn.Module], is_mean: bool, axes: tuple[MeshAxis, ...]) -> None:
        self._root, self._axes = root, axes
        self._factor = 1.0 / math.prod(axis.size for axis in axes) if is_mean else 1.0
        self._waiting: torch.Tensor | None = None
        """The sum of this rank's gradients while ``set_requires_gradient_sync(False)`` holds."""

    @torch.no_grad()
    def __call__(self, grads: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...] | None:
        (grad,) = grads
        root = self._root()
        if grad is None or root is None or reduces_by_itself():
            return None
        total = grad.detach() if self._waiting is None else self._waiting + grad
        if waits_for_more(root):
            self._waiting = total
            return (torch.zeros_like(grad),)
        self._waiting, total = None, total * self._factor
        for axis in self._axes:
            dist.all_reduce(total, group=group_named(axis.group))
        return (total,)
