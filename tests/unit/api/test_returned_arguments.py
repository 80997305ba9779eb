"""An argument to which a step writes, and which it returns, is the very tensor that was given, as in eager code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import wholestep as ws
from tests.harness.training import backward_and_step

RETURNS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "alone": lambda x, y, loss: x, "with a loss": lambda x, y, loss: (loss, x),
    "twice": lambda x, y, loss: {"one": x, "other": [x, loss]}, "both": lambda x, y, loss: (y, x, loss),
    "a view": lambda x, y, loss: (x, x[0], loss), "and one not written to": lambda x, y, loss: [y, x],
}  # fmt: skip


def strided(seed: int) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))[:, ::2]


@pytest.mark.parametrize("give", RETURNS.values(), ids=RETURNS)
def test_it_is_the_same_object_on_the_same_memory(give: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
    def train(decorate: Callable[[Any], Any]) -> list[Any]:
        torch.manual_seed(0)
        model, found = nn.Linear(4, 2), []
        opt = torch.optim.SGD(model.parameters(), lr=0.1)

        @decorate
        def step(x: Tensor, y: Tensor) -> Any:
            x.mul_(0.5)
            loss = (model(x) - y).square().mean()
            backward_and_step(loss, opt)
            x.add_(loss.detach())
            return give(x, y, loss.detach())

        for call in range(4):
            x, y = strided(call), torch.ones(6, 2)
            leaves = pytree.tree_leaves(step(x, y))
            for one in leaves:
                if one is x:
                    one.add_(1)  # by who holds the result
            found.append([[one is x, one is y, one.stride(), one.tolist()] for one in leaves if one.dim() != 1])
            found.append(x.tolist())
        return found

    assert train(lambda step: ws.compile(step, backend="eager", fullgraph=True)) == train(lambda step: step)


def test_virtual_ranks_compare_such_a_step() -> None:
    model = nn.Linear(4, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    @ws.compile(backend="eager")
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        x.mul_(0.5)
        return backward_and_step(model(x).square().mean(), opt), x

    step.verify(torch.randn(8, 4), ranks=2).raise_if_failed()
