"""Backs up all objects of the user's that a step may change, and restores them after a trial."""

from __future__ import annotations

from typing import Any

import torch

from wholestep.capture.functionalize.storage_resize import is_freed
from wholestep.capture.reach.reachable import Reachable
from wholestep.capture.reach.train_state import TrainState, states
from wholestep.ir import op_info
from wholestep.util.gradient_node import is_leaf


class StateBackup:
    """The state of a step at one moment: tensors bit by bit, what is frozen, gradients, optimizers, Python values.

    Costs a copy of the state. `restore` may be called several times, and leaves every object in its place: tensors
    keep their memory and their version counters. Generators are not in here: virtual ranks draw from streams of their
    own, and a step that draws does not run eagerly.
    """

    def __init__(self, found: Reachable, state: TrainState) -> None:
        self._found = found
        self._tensors = [(slot.tensor, _contents(slot.tensor), _version(slot.tensor)) for slot in state.slots]
        self._flags = [(slot.tensor, slot.tensor.requires_grad) for slot in state.slots if is_leaf(slot.tensor)]
        self._grads = [(slot.tensor, slot.tensor.grad) for slot in state.params]
        self._optimizers = [
            (opt, dict(vars(opt)), dict(opt.state), [(held, dict(held)) for _, held in states(opt)])
            for _, opt in state.optimizers
        ]
        self._groups = [(group, dict(group)) for _, opt in state.optimizers for group in opt.param_groups]

    def restore(self) -> None:
        """Puts everything back as it was."""
        for snapshot in self._found.snapshots:
            if next(snapshot.changes(), None) is not None:
                snapshot.restore()
        for opt, attributes, whole, parts in self._optimizers:
            _restore_dict(vars(opt), attributes)
            _restore_dict(opt.state, whole)
            for held, before in parts:
                _restore_dict(held, before)
        for group, held in self._groups:
            _restore_dict(group, held)
        for tensor, requires_grad in self._flags:
            if not is_leaf(tensor) and not tensor._is_view():  # of a view torch gives back no leaf
                tensor.detach_()  # a buffer that the eager step has written a value with a graph to
            if is_leaf(tensor):
                tensor.requires_grad = requires_grad
        for param, grad in self._grads:
            param.grad = grad
        for tensor, contents, version in self._tensors:
            if contents is not None:
                overwrite(tensor, contents)
            if version is not None:
                op_info.SET_VERSION(tensor, version)


def overwrite(target: torch.Tensor, value: torch.Tensor) -> None:
    """Gives `target` the contents of `value`, whose memory may have been freed; then that of `target` is freed too."""
    with torch.no_grad():
        if is_freed(value):
            target.untyped_storage().resize_(0)
            return
        if is_freed(target):
            reach = sum((size - 1) * stride for size, stride in zip(target.shape, target.stride(), strict=True))
            num_bytes = (target.storage_offset() + reach + 1) * target.element_size()
            target.untyped_storage().resize_(int(num_bytes))
        target.detach().copy_(value)


def _contents(tensor: torch.Tensor) -> torch.Tensor | None:
    """A copy; None where elements share memory (an expanded tensor), which no step can write to."""
    if is_freed(tensor):
        return freed_like(tensor)
    strided = tensor.layout is torch.strided
    pairs = zip(tensor.shape, tensor.stride(), strict=True) if strided else ()
    return None if any(size > 1 and stride == 0 for size, stride in pairs) else tensor.detach().clone()


def freed_like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, strides, type and device without memory."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    made.untyped_storage().resize_(0)
    return made


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _restore_dict(container: dict[Any, Any], held: dict[Any, Any]) -> None:
    for key in [key for key in container if key not in held]:
        del container[key]
    container.update(held)
