"""Optimizers, buffers, operators and losses in a compiled step of the older surface; the object that it keeps."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.parallel import DistributedDataParallel

from tests.conformance.spmd.train_step import adam, assert_equal_on_all, differences, floats, row, sgd, train_step
from wholestep.runtime.distributed.world import init
from wholestep.spmd import COMPILED_OBJECT_KEY, GraphModuleTransformation, Override, compile

ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default


def simple() -> list[Tensor]:
    torch.manual_seed(0)
    mod = nn.Linear(10, 10).to(init().device)
    wrapped = DistributedDataParallel(deepcopy(mod))
    torch.manual_seed(dist.get_rank())
    inp = torch.randn(2, 10).to(init().device)

    @compile()
    def step(mod: nn.Module, inp: Tensor) -> list[Tensor | None]:
        mod(inp).sum().backward()
        return [p.grad for p in mod.parameters()]

    grads = step(mod, inp)
    wrapped(inp).sum().backward()
    assert all(p.grad is None for p in mod.parameters()), "gradients live inside of the call"
    size, theirs = dist.get_world_size(), wrapped.parameters()
    return [ours - param.grad * size for ours, param in zip(grads, theirs, strict=True)]


@row("S1", "train_step_simple")
def test_gradients_returned_by_a_step_equal_ddp(ranks2: Any) -> None:
    for found in ranks2.run(simple):
        assert len(found) == 2
        assert all(not difference.any() for difference in found)


def with_sgd(bias: bool) -> list[str]:
    return differences(nn.Linear(10, 10, bias=bias), floats())


@row("S1", "sgd")
@pytest.mark.parametrize("bias", [True, False])
def test_sgd_equals_ddp(ranks2: Any, bias: bool) -> None:
    assert_equal_on_all(ranks2, with_sgd, bias)


class Counts(Override):
    """Replaces nothing; counts the all-reduces of the placed graph."""

    def __init__(self) -> None:
        self.reductions: list[int] = []
        self.state: list[torch.Tensor] = []

    def replacement(self, fqn: str, orig_submodule: nn.Module) -> nn.Module:
        return orig_submodule

    def transform(self, gm: fx.GraphModule, flat_state: list[Tensor]) -> fx.GraphModule:
        self.reductions.append(len(gm.graph.find_nodes(op="call_function", target=ALL_REDUCE)))
        self.state = flat_state
        return gm


def with_adam(foreach: bool, fused: bool) -> list[str]:
    counts = Counts()
    step = compile(module_override=[counts])(train_step)
    mod = nn.Sequential(nn.Linear(10, 10, bias=False))
    found = differences(mod, floats(), partial(adam, foreach=foreach, fused=fused), step)
    if counts.reductions != [1]:
        found.append(f"all-reduces per graph: {counts.reductions}")
    weight, *state = counts.state
    if weight is not mod[0].weight or [tuple(one.shape) for one in state] != [(), (10, 10), (10, 10)]:
        found.append(f"flat_state: {[tuple(one.shape) for one in counts.state]}")
    return found


@pytest.mark.parametrize(
    ("foreach", "fused"),
    [
        pytest.param(True, False, id="foreach", marks=row("S1", "adam_foreach")),
        pytest.param(False, True, id="fused", marks=row("S1", "adam_fused")),
    ],
)
def test_adam_equals_ddp(ranks2: Any, foreach: bool, fused: bool) -> None:
    assert_equal_on_all(ranks2, with_adam, foreach, fused)


def cached(optimized: bool) -> dict[str, Any]:
    device, calls = init().device, []
    theirs = GraphModuleTransformation(2, enable_graph_optimization=optimized)

    def transformation(gm: fx.GraphModule) -> fx.GraphModule:
        calls.append(len(gm.graph.find_nodes(op="call_function", target=ALL_REDUCE)))
        return theirs(gm)

    step = compile(gm_transformation=transformation)(train_step)
    torch.manual_seed(0)
    mod = nn.Linear(10, 10).to(device)
    opt = adam(mod.parameters(), foreach=False)
    inp = torch.randn(2, 10).to(device)
    train_step(mod, opt, inp)
    opt.zero_grad()
    step(mod, opt, inp)
    first = step.__dict__[COMPILED_OBJECT_KEY]
    step(mod, opt, inp)
    second = step._compiled_obj
    step(mod, opt, torch.cat([inp, inp]))
    return {
        "same": first.gm is second.gm,
        "belongs": first.mod is mod and first.opt is opt and first.flat_state[0] is mod.weight,
        "calls": calls,
        "reductions": sum(node.target in (ALL_REDUCE, ALL_REDUCE_) for node in first.gm.graph.nodes),
        "other": step._compiled_obj.gm is not first.gm,
    }


ALL_REDUCE_ = torch.ops._c10d_functional.all_reduce_.default


@row("S1", "gm_cache_and_transformation")
@pytest.mark.parametrize("optimized", [False, True])
def test_the_transformed_graph_is_kept_for_equal_shapes(ranks2: Any, optimized: bool) -> None:
    """The third call has another shape, and so a graph of its own. Optimized, two gradients share a bucket."""
    for found in ranks2.run(cached, optimized):
        assert found.pop("reductions") == (1 if optimized else 2)
        assert found == {"same": True, "belongs": True, "calls": [2, 2], "other": True}


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(10, 10)
        self.register_buffer("scale", torch.ones(10, 10))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.requires_grad = True  # not before: such a buffer cannot be copied by deepcopy
        return torch.matmul(self.fc(x), self.scale)


class AddsGradients(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    def step(self, closure: Any = None) -> None:
        params = self.param_groups[0]["params"]
        assert len(params) == 2
        with torch.no_grad():
            for param in params:
                param += param.grad


def with_buffer() -> list[str]:
    torch.manual_seed(0)
    return differences(Buffered(), floats(), AddsGradients)


@row("S1", "buffer")
def test_a_buffer_that_takes_gradients_equals_ddp(ranks2: Any) -> None:
    assert_equal_on_all(ranks2, with_buffer)


def expanded() -> list[list[int]]:
    device = init().device
    step = compile()(train_step)
    mod = nn.Linear(10, 10).to(device)
    step(mod, sgd(mod.parameters()), torch.randn(2, 10).to(device))
    expand = torch.ops.aten.expand.default
    return [list(node.args[1]) for node in step._compiled_obj.gm.graph.nodes if node.target is expand]


@row("S1", "expand_dimension")
def test_an_expanded_gradient_has_the_size_of_the_batch(ranks2: Any) -> None:
    for found in ranks2.run(expanded):
        assert found
        assert all(sizes == [2, 10] for sizes in found)


class Calls(nn.Module):
    """A linear layer and what a test does with it: ``body(fc, x)``."""

    def __init__(self, body: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.body = nn.Linear(10, 10), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.fc, x)


def factory_arange(fc: nn.Linear, x: Tensor) -> Tensor:
    y = torch.arange(x.numel(), device=x.device).view(x.shape)
    z = torch.arange(0, x.numel(), device=x.device).view(x.shape)
    return fc(x) + y + z


BODIES: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "log_softmax": lambda fc, x: F.log_softmax(fc(x), dim=1),
    "factory_full": lambda fc, x: torch.full(x.shape, 7, device=x.device) + fc(x),
    "factory_arange": factory_arange,
    "sym_numel": lambda fc, x: fc(x) * fc.weight.numel(),
    "sym_stride": lambda fc, x: fc(x) * fc.weight.stride(0),
    "scalar": lambda fc, x: fc(x) * torch.ops.aten.scalar_tensor.default(7, dtype=x.dtype, device=x.device),
    "stack": lambda fc, x: torch.stack([x, fc(x)], dim=1),
    "arithmetic_ops_on_symint": lambda fc, x: fc(x) * (x.shape[0] * x.numel() - x.shape[0] // 2),
    "slice": lambda fc, x: fc(x)[:, :1],
    "bulk_cat": lambda fc, x: torch.cat([fc(x) for _ in range(100)], dim=1),
}


def with_body(name: str) -> list[str]:
    torch.manual_seed(0)
    return differences(Calls(BODIES[name]), floats())


@pytest.mark.parametrize("name", [pytest.param(name, marks=row("S1", name)) for name in BODIES])
def test_a_step_with_an_operator_equals_ddp(ranks2: Any, name: str) -> None:
    assert_equal_on_all(ranks2, with_body, name)


class Classifies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mod, self.loss = nn.Sequential(nn.Linear(10, 10), nn.LogSoftmax(dim=1)), nn.NLLLoss()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.mod(x), target)


VOCABULARY, WIDTH, BATCH, BLOCK = 10, 8, 2, 20


class Embeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.fc = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.loss = nn.LayerNorm(WIDTH, elementwise_affine=False), nn.NLLLoss()

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        return self.loss(F.softmax(self.fc(self.norm(self.emb(ids))), dim=1), target)


class EmbedsPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.norm, self.fc = nn.LayerNorm(WIDTH, elementwise_affine=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        places = torch.arange(0, ids.shape[1], dtype=torch.long, device=ids.device).unsqueeze(0)
        scores = F.softmax(self.fc(self.norm(self.positions(places) + self.words(ids))), dim=-1)
        return F.cross_entropy(scores.view(-1, scores.size(-1)), target.view(-1))


def classes(*shape: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randint(0, VOCABULARY, shape), torch.randint(0, WIDTH, shape))


def rows_of_floats() -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, 10), torch.randint(0, 10, (BATCH,))


LOSSES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]] = {
    "nll_loss": (Classifies, rows_of_floats),
    "replicated_embedding": (Embeds, classes(BATCH)),
    "pos_embedding": (EmbedsPositions, classes(BATCH, BLOCK)),
}


def with_loss(name: str) -> list[str]:
    model, draw = LOSSES[name]
    torch.manual_seed(0)
    mod, first = model(), draw()
    torch.manual_seed(1 + dist.get_rank())
    return differences(mod, [first, draw(), draw()])


@pytest.mark.parametrize("name", [pytest.param(name, marks=row("S1", name)) for name in LOSSES])
def test_a_step_with_a_loss_equals_ddp(ranks2: Any, name: str) -> None:
    assert_equal_on_all(ranks2, with_loss, name)
