"""Fake tensors do what kernels do to strides and version counters, where torch's descriptions of them say otherwise.

What is traced depends on strides: ``reshape`` is a view of one layout and a copy of another. Of batch norms on the
CPU torch says that they keep any layout; the kernels keep contiguous and channels-last ones and make others contiguous.
Gradients of losses that compare two tensors are contiguous, whatever the tensors are.

Kernels over lists count what they write; their descriptions do not, and those of fused optimizers count nothing, as
their kernels. A number that was read of a fake tensor is remembered until its counter moves, so `.item()` behind a
second update gave the number of the first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import increment_version

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
        written = _written(func, args, kwargs or {}) if func._schema.is_mutable else []
        over_lists = func.__name__.startswith("_foreach_")
        counters = [over_lists and not one.is_inference() and one._version for one in written]
        found: Any = super().__torch_dispatch__(func, types, args, kwargs)
        for one, counter in zip(written, counters, strict=True):
            one.item_memo = None
            if counter is not False and one._version == counter:
                increment_version(one)
        if func in _CONTIGUOUS:
            return _with_strides(found, _contiguous(found))
        place = _NORMALIZED.get(func)
        if place is None or not isinstance(found[0], FakeTensor) or found[0].device.type != "cpu":
            return found
        source = args[place]
        strides = source.stride() if _is_kept(source) else _contiguous(source)
        return (_with_strides(found[0], strides), *found[1:])


def _written(func: Any, args: Any, kwargs: Any) -> list[FakeTensor]:
    """The fake tensors that an operator writes to."""
    places = [place for place, one in enumerate(func._schema.arguments) if one.alias_info and one.alias_info.is_write]
    named = (func._schema.arguments[place].name for place in places)
    values = [args[place] if place < len(args) else kwargs.get(name) for place, name in zip(places, named, strict=True)]
    flat = (one for value in values for one in (value if isinstance(value, (list, tuple)) else [value]))
    return [one for one in flat if isinstance(one, FakeTensor)]


def _with_strides(made: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    return made if made.stride() == strides else made.new_empty_strided(made.shape, strides)


def _contiguous(tensor: torch.Tensor) -> tuple[int, ...]:
    return torch.empty(tensor.shape, device="meta").stride()


def _is_kept(source: torch.Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return source.is_contiguous() or (
        source.dim() in formats and source.is_contiguous(memory_format=formats[source.dim()])
    )
