"""Parameters that a step makes and returns: they leave the graph as tensors and are Parameters again after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from wholestep.capture.python import tree_util


@dataclass(slots=True)
class _NewParameter:
    """A Parameter taken apart into its values and its gradient."""

    value: torch.Tensor


def _close_parameter(parts: Any, requires_grad: bool) -> nn.Parameter:
    value, grad = parts
    parameter = nn.Parameter(value, requires_grad)
    parameter.grad = grad
    return parameter


@dataclass(slots=True)
class _Result:
    """The leaves of a result, among them new Parameters, and the structure they belong in."""

    leaves: list[Any]
    spec: tree_util.TreeSpec


pytree.register_pytree_node(
    _NewParameter,
    lambda made: ([made.value, made.value.grad], made.value.requires_grad),
    _close_parameter,
    serialized_type_name="wholestep.capture.tracing.new_parameters._NewParameter",
)
pytree.register_pytree_node(
    _Result,
    lambda result: (result.leaves, result.spec),
    lambda leaves, spec: tree_util.unflatten(list(leaves), spec),
    serialized_type_name="wholestep.capture.tracing.new_parameters._Result",
)


def flatten(result: Any, known: dict[int, int]) -> tuple[list[Any], tree_util.TreeSpec]:
    """Leaves and structure of what a step returns.

    A Parameter that is none of `known` (ids of the tensors of the state) was made by the step. The structure says so,
    and what `tree.unflatten` gives has a new Parameter in its place: a leaf, with ``requires_grad`` and gradient.
    """
    leaves, spec = tree_util.flatten(result)
    made = [isinstance(leaf, nn.Parameter) and id(leaf) not in known for leaf in leaves]
    if not any(made):
        return leaves, spec
    opened = [_NewParameter(leaf) if is_made else leaf for leaf, is_made in zip(leaves, made, strict=True)]
    return pytree.tree_flatten(_Result(opened, spec))
