"""Checkpointed modules in DistributedDataParallel: gradients of the whole batch on one rank, over five iterations."""

from __future__ import annotations

import copy
import functools
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import wholestep as ws
from tests.conformance.wrapped_models.against_eager import ddp, device
from tests.harness.rank_pools import Pool

row = functools.partial(pytest.mark.row, "S11")

WIDTH, ROWS, ITERATIONS = 20, 16, 5


class Once(nn.Module):
    """The second layer is computed again in the backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.reentrant = reentrant

    def again(self, layer: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(layer, x, use_reentrant=self.reentrant)
        return out

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.second, self.first(x))


class WithUnused(Once):
    """A third layer that no forward uses."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(reentrant)
        self.third = nn.Linear(WIDTH, WIDTH)


class Twice(Once):
    """The second layer, checkpointed twice."""

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.second, self.again(self.second, self.first(x)))


class Alternating(Once):
    """Another layer in each call: counted in Python."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(reentrant)
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.again(self.second if self.count % 2 else self.first, x)


class Around(nn.Sequential):
    """Two layers, to be checkpointed as one, wrapper included."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.reentrant, self.first, self.second = reentrant, self[0], self[1]


MODELS = {model.__name__: model for model in (Once, WithUnused, Twice, Alternating, Around)}


def shared(model: Any) -> Any:
    model.first.weight = model.second.weight
    return model


def backward(model: Any, x: Tensor, y: Tensor) -> None:
    nn.functional.mse_loss(model(x), y).backward()


def backward_of_all_again(model: Any, x: Tensor, y: Tensor) -> None:
    """A reentrant checkpoint needs an input that takes a gradient."""
    reentrant = getattr(model, "module", model).reentrant
    out = checkpoint(model, x.detach().requires_grad_(), use_reentrant=reentrant)
    nn.functional.mse_loss(out, y).backward()


def local_gradients(name: str, shares: bool, reentrant: bool, settings: dict[str, bool]) -> bool:
    """Compares with a training of the whole batch on this rank; whether the step was one graph."""
    torch.manual_seed(3)
    local = MODELS[name](reentrant).to(device())
    local = shared(local) if shares else local
    wrapper = ddp(copy.deepcopy(local), bucket_cap_mb=1, **settings)
    step = backward_of_all_again if name == "Around" else backward
    compiled, rank = ws.compile(step), ws.init().rank
    x, y = torch.rand(2 * ROWS, WIDTH, device=device()), torch.randn(2 * ROWS, WIDTH, device=device())
    own = slice(rank * ROWS, (rank + 1) * ROWS)
    for number in range(ITERATIONS):
        for model in (local, wrapper):
            model.zero_grad(set_to_none=False)
        step(local, x, y)
        compiled(wrapper, x[own], y[own])
        for (fqn, one), other in zip(local.named_parameters(), wrapper.parameters(), strict=True):
            wanted, got = (torch.zeros_like(one) if p.grad is None else p.grad for p in (one, other))
            torch.testing.assert_close(got, wanted, rtol=1.3e-6, atol=5e-5, msg=f"{name} {settings} {number}: {fqn}")
    return compiled._live is None


def all_settings(name: str, shares: bool, reentrant: bool) -> list[bool]:
    found = []
    for view, static in product((False, True), repeat=2):
        settings = {"gradient_as_bucket_view": view, "static_graph": static, "find_unused_parameters": not static}
        found.append(local_gradients(name, shares, reentrant, settings))
    return found


@pytest.mark.parametrize(
    ("name", "shares"),
    [
        pytest.param("Once", False, marks=row("ddp_checkpointing_once")),
        pytest.param("WithUnused", False, marks=row("ddp_checkpointing_unused_params")),
        pytest.param("Twice", False, marks=row("ddp_checkpointing_twice")),
        pytest.param("Around", True, marks=row("ddp_checkpointing_weight_sharing")),
        pytest.param("Twice", True, marks=row("ddp_checkpointing_twice_weight_sharing")),
    ],
)
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_are_those_of_the_whole_batch(ranks2: Pool, name: str, shares: bool, reentrant: bool) -> None:
    """Every one of them is one graph, also where DistributedDataParallel raises an error: twice, and reentrant."""
    assert ranks2.run(all_settings, name, shares, reentrant) == [[True] * 4] * 2


@pytest.mark.parametrize(
    "shares",
    [
        pytest.param(False, marks=row("ddp_checkpointing_dynamic_module")),
        pytest.param(True, marks=row("ddp_checkpointing_dynamic_weight_sharing")),
    ],
)
def test_a_module_that_chooses_its_layer_by_a_count_is_live(ranks2: Pool, shares: bool) -> None:
    assert ranks2.run(all_settings, "Alternating", shares, False) == [[False] * 4] * 2
