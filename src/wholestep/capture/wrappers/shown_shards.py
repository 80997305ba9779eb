"""What the user's code sees of parameters that the user has cut with ``fully_shard``: DTensors, as in eager code.

[Note: the class of a shard]
A trace computes with whole tensors in the place of shards. Code that asks ``isinstance(p.grad, DTensor)`` would go
another way with them: it would take the norm of a whole gradient for that of a part, and add it up over the ranks. So
those parameters and their gradients are instances of DTensor to code outside of torch. What a DTensor alone has, such
as ``to_local``, ends the trace. The step is live then, and such code is given the DTensors themselves.

In a forward of its module, and up to the backward where it stays gathered, a parameter is a plain one, as in eager
code. What is computed of shards counts as plain: `clip_grad_norm_` gives the whole norm.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from wholestep.capture.python.attribute_access import missed_attributes
from wholestep.capture.python.code_owner import Owner, owner_of_file
from wholestep.capture.python.tracing_thread import on_this_thread
from wholestep.capture.python.user_frame import current_line
from wholestep.capture.scalars.symbol_views import asks_outside_torch, class_shown, plain_class
from wholestep.capture.wrappers.fully_shard_hooks import put_parameters_back
from wholestep.capture.wrappers.fully_shard_settings import groups_of_user
from wholestep.errors import CaptureError

_GRADIENT: Any = torch.Tensor.grad
"""That of torch itself, which a trace replaces: nobody is told."""


class ShownShards:
    """The parameters of one trace that its user has cut."""

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        """`roots`: the modules of the step."""
        self._group = {id(one.sharded_param): group for group in groups_of_user(roots) for one in group.fsdp_params}
        self._gradients: dict[int, torch.Tensor] = {}
        """Those that the trace has seen, by id."""
        self._gathered: dict[int, Any] = {}
        """The groups whose parameters are plain now, by id."""

    def __bool__(self) -> bool:
        return bool(self._group)

    def gathers(self, group: Any) -> None:
        """The parameters of a group of ``fully_shard`` are gathered."""
        self._gathered[id(group)] = group

    def drops(self, group: Any) -> None:
        """They are dropped."""
        self._gathered.pop(id(group), None)

    def backward_ends(self) -> None:
        """All are dropped."""
        for group in self._gathered.values():
            put_parameters_back(group)
        self._gathered.clear()

    def note_gradient(self, param: torch.Tensor) -> None:
        """Python is about to look at the gradient of a tensor."""
        grad = _GRADIENT.__get__(param) if id(param) in self._group else None
        if grad is not None:
            self._gradients[id(grad)] = grad

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether eager code would see a DTensor here."""
        group = self._group.get(id(tensor))
        return id(tensor) in self._gradients if group is None else id(group) not in self._gathered

    def check_results(self, leaves: Iterable[object]) -> None:
        """Raises CaptureError for a gradient among what a step returns: eager code returns a DTensor."""
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and id(leaf) in self._gradients:
                raise CaptureError(
                    f"The step returns a gradient, a {list(leaf.shape)}, that fully_shard has cut. Eager code returns "
                    f"this rank's part as a DTensor, and a graph has the whole gradient. Return what you compute of it."
                )

    @contextmanager
    def shown(self, raised: list[Exception]) -> Iterator[None]:
        """While open, they are DTensors to code outside of torch. `raised` gets what ends the trace, too."""
        if not self:
            yield
            return

        def refuse(tensor: torch.Tensor, name: str) -> None:
            if hasattr(DTensor, name) and asks_outside_torch(_frame_of_others()) and self.has(tensor):
                raised.append(_no_whole_tensor_has(tensor, name))
                raise raised[-1]

        seen = class_shown(FakeTensor, lambda one: DTensor if self.has(one) else plain_class(one))
        with seen, missed_attributes(on_this_thread(refuse, lambda tensor, name: None)):
            yield


def _frame_of_others() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and owner_of_file(frame.f_code.co_filename) is Owner.OURS:
        frame = frame.f_back
    return frame


def _no_whole_tensor_has(tensor: torch.Tensor, name: str) -> CaptureError:
    return CaptureError(
        f"The step asks a {list(tensor.shape)} that fully_shard has cut for {name}, at {current_line()}. A graph "
        f"computes with whole tensors and has no part of one. Use the tensor as if it was whole, as "
        f"torch.nn.utils.clip_grad_norm_ does, or leave such lines out of the step."
    )
