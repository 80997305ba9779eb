"""A training step compiled as a whole by the older surface, compared with eager DistributedDataParallel.

Its gradients are the mean over the ranks; here they are the sum. With two ranks the mean times two is the sum bit for
bit, so parameters and buffers must be equal, not close.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wholestep.runtime.distributed.world import init
from wholestep.spmd import compile

row = pytest.mark.row


def train_step(mod: nn.Module, opt: torch.optim.Optimizer, *batch: Tensor) -> None:
    mod(*batch).sum().backward()
    opt.step()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, foreach=True)


def adam(params: Any, **which: bool) -> torch.optim.Optimizer:
    """On GPUs with its step count there, as whole-step graphs want it."""
    return torch.optim.Adam(params, lr=0.01, capturable=init().device.type == "cuda", **which)


def differences(
    mod: nn.Module,
    batches: Sequence[tuple[Tensor, ...]],
    make_opt: Callable[[Any], torch.optim.Optimizer] = sgd,
    step: Callable[..., Any] | None = None,
) -> list[str]:
    """Names of the parameters and buffers in which `step` leaves `mod` other than DistributedDataParallel would.

    The first batch, which must be the same on every rank, is for an eager step, so that optimizer state exists.
    """
    device = init().device
    mod.to(device)
    opt, wrapped = make_opt(mod.parameters()), DistributedDataParallel(deepcopy(mod))
    wrapped_opt = make_opt(wrapped.parameters())
    first, *rest = [tuple(tensor.to(device) for tensor in batch) for batch in batches]
    for one, its in ((mod, opt), (wrapped, wrapped_opt)):
        train_step(one, its, *first)
        for tensor in (*one.parameters(), *one.buffers()):
            tensor.grad = None
    step = compile()(train_step) if step is None else step
    for batch in rest:
        step(mod, opt, *batch)
        wrapped(*batch).sum().backward()
        with torch.no_grad():
            for param in wrapped.parameters():
                param.grad *= dist.get_world_size()
        wrapped_opt.step()
        for tensor in (*wrapped.parameters(), *wrapped.buffers()):
            tensor.grad = None
    ours, theirs = mod.state_dict(), wrapped.module.state_dict()
    return [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]


def floats(count: int = 3) -> list[tuple[Tensor, ...]]:
    """Batches of floats: the first is the same on every rank, the others are not."""
    torch.manual_seed(100)
    first = torch.randn(2, 10)
    torch.manual_seed(dist.get_rank())
    return [(first,), *((torch.randn(2, 10),) for _ in range(count - 1))]


def assert_equal_on_all(pool: Any, check: Callable[..., list[str]], *args: Any) -> None:
    assert pool.run(check, *args) == [[]] * pool.nproc
