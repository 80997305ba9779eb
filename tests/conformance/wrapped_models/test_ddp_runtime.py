"""What DistributedDataParallel does around a module: hooks for communication, outputs, sparse gradients, iterations."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import wholestep as ws
from tests.conformance.wrapped_models.against_eager import ddp, device, rank_seed
from tests.harness.equality import equal
from tests.harness.rank_pools import Pool

row = functools.partial(pytest.mark.row, "S11")


class Shifted(nn.Module):
    """Adds a parameter to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.shift + x


def mean_backward(model: Any, x: Tensor) -> None:
    model(x).mean().backward()


def two_hook(state, bucket):  # type: ignore[no-untyped-def] # DistributedDataParallel wants its own class or none
    """A future that another one follows: ones, and one more."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(torch.ones_like(bucket.buffer()))
    return future.then(lambda done: done.value() + torch.ones_like(done.value()))


HOOKS: dict[str, tuple[Any, float]] = {
    # hook, and the gradient: that of each rank is 0.25 everywhere
    "none": (None, 0.25),
    "own": (two_hook, 2.0),
    "allreduce": (default_hooks.allreduce_hook, 0.25),
    "fp16": (default_hooks.fp16_compress_hook, 0.25),
    "builtin_allreduce": (dist.BuiltinCommHookType.ALLREDUCE, 0.25),  # type: ignore[attr-defined]
    "builtin_fp16": (dist.BuiltinCommHookType.FP16_COMPRESS, 0.25),  # type: ignore[attr-defined]
}


def gradient_with(name: str, view: bool) -> None:
    hook, wanted = HOOKS[name]
    model = ddp(Shifted(), gradient_as_bucket_view=view)
    if name.startswith("builtin"):
        model._register_builtin_comm_hook(hook)
    elif hook is not None:
        model.register_comm_hook(None, hook)
    compiled = ws.compile(mean_backward, fullgraph=True)
    for _ in range(2):
        compiled(model, torch.ones(2, 2, device=device()) * ws.init().rank)
        assert model.module.shift.grad is not None
        assert torch.equal(model.module.shift.grad, torch.full((2, 2), wanted, device=device()))
        model.zero_grad()


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=row("builtin_ddp_comm_hooks" if "builtin" in one else "ddp_comm_hook")) for one in HOOKS],
)
def test_a_hook_gives_the_gradient(ranks2: Pool, name: str, view: bool) -> None:
    ranks2.run(gradient_with, name, view)


STARTS = [case for case in product([0, 1], [True, False], [True, False]) if any(case[1:])]


@row("invalid_powerSGD_state")
@pytest.mark.parametrize(("start", "error_feedback", "warm_start"), STARTS)
def test_powersgd_with_a_memory_does_not_start_before_the_third_iteration(
    start: int, error_feedback: bool, warm_start: bool
) -> None:
    """Neither torch's state nor ours."""
    with pytest.raises(ValueError, match="`start_powerSGD_iter` > 1"):
        powerSGD_hook.PowerSGDState(
            None, 1, start_powerSGD_iter=start, use_error_feedback=error_feedback, warm_start=warm_start
        )
    with pytest.raises(ws.ConfigError, match=r"start_iter=\.\.\.\) wants more than 1"):
        ws.PowerSGD(start_iter=start, error_feedback=error_feedback, warm_start=warm_start)


TABLES = {
    "embedding": lambda: nn.Embedding(10, 10, sparse=True),
    "bag": lambda: nn.EmbeddingBag(10, 10, sparse=True),
}


class Looked(nn.Module):
    """Softmax of the rows that were looked up."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.table = TABLES[name]()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.table(x).softmax(1)
        return out


def square_backward(model: Any, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    out.square().sum().backward()
    return out.detach()


def sparse_gradients(name: str, accumulates: bool) -> bool:
    """Whether the step was one graph."""
    torch.manual_seed(0)
    eager = ddp(Looked(name))
    ours = ddp(copy.deepcopy(eager.module))
    compiled = ws.compile(square_backward)
    for number in range(3):
        rank_seed(number)
        x = torch.randint(10, (2, 3), device=device())
        assert equal(square_backward(eager, x), compiled(ours, x))
        wanted, got = eager.module.table.weight.grad, ours.module.table.weight.grad
        assert got.layout is wanted.layout is torch.sparse_coo
        torch.testing.assert_close(got.to_dense(), wanted.to_dense())
        if not accumulates:
            eager.zero_grad()
            ours.zero_grad()
    return compiled._live is None


@row("sparse_gradients")
@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("name", TABLES)
def test_sparse_gradients_are_joined(pool2: Pool, name: str, accumulates: bool) -> None:
    """One graph; one that adds to a sparse gradient is live."""
    assert pool2.run(sparse_gradients, name, accumulates) == [not accumulates] * 2


@dataclass
class Outputs:
    """What a module gives: a tensor or none, and others by name."""

    first: Tensor | None
    others: dict[str, Tensor]


class GivesOutputs(nn.Module):
    """Two stacks, of which the first may be left out."""

    def __init__(self, skips_first: bool) -> None:
        super().__init__()
        self.one, self.two = (nn.Sequential(*(nn.Linear(10, 10) for _ in range(3))) for _ in range(2))
        self.skips_first = skips_first

    def forward(self, x: Tensor) -> Outputs:
        others = {"a": self.two(x), "b": self.two(x).relu()}
        return Outputs(None if self.skips_first else self.one(x).relu(), others)


def loss_backward(model: Any, x: Tensor) -> Outputs:
    out: Outputs = model(x)
    total = out.others["a"] + out.others["b"]
    total = total if out.first is None else total + out.first
    nn.functional.mse_loss(total, torch.ones_like(total)).backward()
    return out


def dataclass_outputs(skips_first: bool) -> int:
    torch.manual_seed(0)
    local = GivesOutputs(skips_first).to(device())
    wrapper = ddp(copy.deepcopy(local), find_unused_parameters=True)
    compiled, rank = ws.compile(loss_backward, fullgraph=True), ws.init().rank
    out = compiled(wrapper, torch.ones(4, 10, device=device()) * rank)
    wanted = loss_backward(local, torch.cat([torch.ones(4, 10, device=device()) * one for one in range(2)]))
    assert type(out) is Outputs
    assert (out.first is None) == skips_first
    own = slice(4 * rank, 4 * rank + 4)
    torch.testing.assert_close(out.others["b"].detach(), wanted.others["b"][own].detach())
    for one, other in zip(local.parameters(), wrapper.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(other.grad, one.grad)
    return compiled.cache_info().traces


@pytest.mark.parametrize(
    "skips_first",
    [
        pytest.param(False, marks=row("dataclass_output")),
        pytest.param(True, marks=row("dataclass_output_unused_param")),
    ],
)
def test_a_dataclass_is_given_and_what_it_leaves_out_has_no_gradient(ranks2: Pool, skips_first: bool) -> None:
    assert ranks2.run(dataclass_outputs, skips_first) == [1, 1]


def small_net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(2, 10, bias=False), nn.ReLU(), nn.Linear(10, 50, bias=False), nn.ReLU(),
        nn.Linear(50, 4, bias=False), nn.Softmax(dim=1),
    )  # fmt: skip


def train(model: Any, x: Tensor, y: Tensor) -> None:
    nn.functional.mse_loss(model(x), y).backward()
    with torch.no_grad():
        for param in model.parameters():
            param -= param.grad
            param.grad = None


def two_iterations(view: bool) -> int:
    torch.manual_seed(1)
    local = small_net().to(device())
    wrapper = ddp(copy.deepcopy(local), bucket_cap_mb=0.001, gradient_as_bucket_view=view)
    x, y = torch.randn(2, 2).to(device()), torch.randn(2, 4).to(device())
    compiled, own = ws.compile(train, fullgraph=True), slice(ws.init().rank, ws.init().rank + 1)
    for iteration in range(2):
        train(local, x, y)
        compiled(wrapper, x[own], y[own])
        for one, other in zip(local.parameters(), wrapper.parameters(), strict=True):
            torch.testing.assert_close(other, one, rtol=1.3e-6, atol=5e-5)
        torch.manual_seed(1337 + iteration)
        x = x[torch.randperm(2)]
    return compiled.cache_info().traces


@row("ddp_with_process_group")
@pytest.mark.parametrize("view", [False, True])
def test_two_iterations_equal_a_local_training_of_the_whole_batch(ranks2: Pool, view: bool) -> None:
    assert ranks2.run(two_iterations, view) == [1, 1]
