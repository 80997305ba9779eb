"""SyncBatchNorm in operators that a graph holds, on every device.

Torch's own function leaves out ranks whose input is empty, by an index that is data, and calls kernels that CPUs lack.
Here every rank sends the count, the mean and the sum of squares around it, and one that has nothing counts as nothing:
no branch, no NaN, and one text for all ranks.
Source of the sums: Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
Variances".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules import batchnorm

from wholestep.capture.python.tracing_thread import on_this_thread


class _Normalize(torch.autograd.Function):
    """What ``SyncBatchNorm`` applies, with its arguments: `x` has its channels in dim 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
        """Normalizes with the statistics of all ranks, and moves the running ones.

        `rest`: weight, bias, running mean and variance, each a tensor or None; then eps, momentum, group, its size.
        """
        weight, bias, mean, var, eps, momentum, group, num_ranks = rest
        dims, wide = _others(x), torch.promote_types(x.dtype, torch.float32)
        values, count = x.to(wide), _count(x)
        own_mean = values.sum(dims) / max(1, count)
        own_squares = (values - _along(own_mean, x)).square().sum(dims)
        sent = torch.cat([own_mean, own_squares, own_mean.new_full((1,), count)])
        received = [torch.empty_like(sent) for _ in range(num_ranks)]
        dist.all_gather(received, sent, group=group)
        means, squares, counts = torch.stack(received).split([len(own_mean), len(own_mean), 1], dim=1)
        total = counts.sum()
        batch_mean = (means * counts).sum(0) / total.clamp(min=1)
        batch_squares = (squares + counts * (means - batch_mean).square()).sum(0)
        if mean is not None and var is not None:
            mean.mul_(1 - momentum).add_((batch_mean * momentum).to(mean.dtype))
            var.mul_(1 - momentum).add_((batch_squares / (total - 1).clamp(min=1) * momentum).to(var.dtype))
        scale = (batch_squares / total.clamp(min=1) + eps).rsqrt()
        ctx.save_for_backward(x, weight, batch_mean, scale, total)
        ctx.group, ctx.has_bias = group, bias is not None
        normal = (values - _along(batch_mean, x)) * _along(scale, x)
        normal = normal if weight is None else normal * _along(weight.to(wide), x)
        normal = normal if bias is None else normal + _along(bias.to(wide), x)
        return normal.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Gradients of `weight` and `bias` are those of this rank; that of `x` is of the sum over all ranks."""
        x, weight, mean, scale, total = ctx.saved_tensors
        dims, wide = _others(x), mean.dtype
        normal = (x.to(wide) - _along(mean, x)) * _along(scale, x)
        out = grad.to(wide)
        of_bias, of_weight = out.sum(dims), (out * normal).sum(dims)
        of_x = None
        if ctx.needs_input_grad[0]:
            sums = torch.cat([of_bias, of_weight])
            dist.all_reduce(sums, group=ctx.group)
            shift, slope = (sums / total.clamp(min=1)).chunk(2)
            factor = scale if weight is None else scale * weight.to(wide)
            of_x = ((out - _along(shift, x) - normal * _along(slope, x)) * _along(factor, x)).to(x.dtype)
        return (
            of_x,
            None if weight is None else of_weight.to(weight.dtype),
            of_bias.to(weight.dtype if weight is not None else x.dtype) if ctx.has_bias else None,
            *[None] * 6,
        )


def _others(x: Tensor) -> list[int]:
    """All dims but that of the channels."""
    return [0, *range(2, x.dim())]


def _count(x: Tensor) -> int:
    """How many values there are of each channel."""
    return prod(x.shape[dim] for dim in _others(x))


def _along(channels: Tensor, x: Tensor) -> Tensor:
    """A number for each channel, in the shape that goes with `x`."""
    return channels.view(-1, *[1] * (x.dim() - 2))


class _Instead:
    """A module with other things under some of its names."""

    def __init__(self, module: Any, **others: Any) -> None:
        self._module = module
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@contextmanager
def graph_batch_norms() -> Iterator[None]:
    """While open, SyncBatchNorm on this thread computes with `_Normalize`, and on a CPU too."""
    forward, of_extension = nn.SyncBatchNorm.forward, torch._C._get_privateuse1_backend_name
    # It asks whether its input is on a device with torch's kernels, or on that of an extension. Only its own file is
    # told so: fake tensors of torch 2.11 ask the same, and would number the CPU.
    extension_is_cpu = on_this_thread(lambda: "cpu", of_extension)
    told = _Instead(torch, _C=_Instead(torch._C, **{of_extension.__name__: extension_is_cpu}))

    def on_any_device(module: nn.SyncBatchNorm, x: Tensor) -> Tensor:
        if x.device.type != "cpu":
            return forward(module, x)
        with patch.object(batchnorm, "torch", told):
            return forward(module, x)

    of_torch: Any = vars(batchnorm)["sync_batch_norm"]
    applied = SimpleNamespace(apply=on_this_thread(_Normalize.apply, of_torch.apply))
    with (
        patch.object(nn.SyncBatchNorm, "forward", on_this_thread(on_any_device, forward)),
        patch.object(batchnorm, "sync_batch_norm", applied),
    ):
        yield
