"""Table of the placement rules that every strategy has, by operator: today that of a gradient.

How operators run on shards is in `wholestep.place.sharded_rules`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from wholestep.ir import op_info
from wholestep.place.interpreter import Placer, Rule

_PASS_THROUGH = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})


def place_gradient(placer: Placer, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Replaces a marker by the strategy's reduction, once per gradient.

    A gradient that only accumulation reads is not reduced.

    When a step calls backward several times, the earlier markers of a parameter feed only the sum that the
    last one marks. Reducing the last reduces all: the mean of sums is the sum of means.
    """
    grad, name = args
    return grad if only_accumulated(node, name) else placer.strategy.reduce_gradient(placer, grad, name)


def only_accumulated(node: fx.Node, name: str) -> bool:
    """Whether everything that reads `node` adds it to a later gradient of the same parameter."""
    if not node.users:
        return False
    for user in node.users:
        if user.target is op_info.GRADIENT and user.args[1] == name:
            continue
        copies = user.target is torch.ops.aten.copy.default
        if copies and user.args[1] is not node:  # what is written over is not read
            continue
        adds = user.target is torch.ops.aten.add.Tensor and not user.kwargs and len(user.args) == 2
        if not (adds or copies or user.target in _PASS_THROUGH) or not only_accumulated(user, name):
            return False
    return True


RULES: dict[Any, Rule] = {
    op_info.GRADIENT: place_gradient,
}
