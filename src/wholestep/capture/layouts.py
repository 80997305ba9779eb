"""Fake tensors with the strides that kernels really give, where torch's descriptions of them say something else.

What is traced depends on strides: ``reshape`` is a view of one layout and a copy of another. Of batch norms on the
CPU torch says that they keep any layout; the kernels keep contiguous and channels-last ones and make others contiguous.
Gradients of losses that compare two tensors are contiguous, whatever the tensors are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

aten = torch.ops.aten

_NORMALIZED = {
    aten.native_batch_norm.default: 0,
    aten._native_batch_norm_legit.default: 0,
    aten._native_batch_norm_legit.no_stats: 0,
    aten._native_batch_norm_legit_no_training.default: 0,
    aten.native_batch_norm_backward.default: 1,
}
"""Operator of the CPU -> place of the argument whose layout its first result has."""

_CONTIGUOUS = frozenset({
    aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default,
})  # fmt: skip


class Fakes(FakeTensorMode):
    """The mode in which a step is traced."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What the operator gives, with the strides of the kernel."""
        found: Any = super().__torch_dispatch__(func, types, args, kwargs)
        if func in _CONTIGUOUS:
            return _with_strides(found, _contiguous(found))
        place = _NORMALIZED.get(func)
        if place is None or not isinstance(found[0], FakeTensor) or found[0].device.type != "cpu":
            return found
        source = args[place]
        strides = source.stride() if _is_kept(source) else _contiguous(source)
        return (_with_strides(found[0], strides), *found[1:])


def _with_strides(made: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    return made if made.stride() == strides else made.new_empty_strided(made.shape, strides)


def _contiguous(tensor: torch.Tensor) -> tuple[int, ...]:
    return torch.empty(tensor.shape, device="meta").stride()


def _is_kept(source: torch.Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return source.is_contiguous() or (
        source.dim() in formats and source.is_contiguous(memory_format=formats[source.dim()])
    )
