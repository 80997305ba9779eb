"""Keys that a step adds to a dict stand in the order in which it adds them, whatever they are for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import wholestep as ws
from tests.harness.training import backward_and_step

Write = Callable[[dict[str, Any], Tensor], None]


def mixed(table: dict[str, Any], loss: Tensor) -> None:
    table["z"] = loss.item()
    table["loss"] = loss
    table["a"] = 1
    table["double"] = loss * 2


def tensor_first(table: dict[str, Any], loss: Tensor) -> None:
    table.update(z=loss, a=loss.item(), b={"c": loss})


def twice_the_same(table: dict[str, Any], loss: Tensor) -> None:
    table["z"] = table["y"] = loss
    table["a"] = loss.item()


def later_than_others(table: dict[str, Any], loss: Tensor) -> None:
    table.setdefault("count", 0)
    table["eval"] = loss.item()
    table["out"] = loss


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize(
    "begin", [{}, {"out": None}, {"count": 3, "old": "text"}], ids=["empty", "one of them", "others"]
)
@pytest.mark.parametrize("write", [mixed, tensor_first, twice_the_same, later_than_others])
def test_keys_stand_in_the_order_of_eager_code(write: Write, begin: dict[str, Any], may_go_live: bool) -> None:
    def trained(decorate: Callable[[Any], Any]) -> list[Any]:
        torch.manual_seed(0)
        model, table = torch.nn.Linear(3, 2), dict(begin)
        opt, seen = torch.optim.SGD(model.parameters(), lr=0.1), list[Any]()

        @decorate
        def step(x: Tensor) -> None:
            loss = model(x).square().mean()
            backward_and_step(loss, opt)
            write(table, loss.detach())

        for call in range(4):
            step(torch.randn(4, 3, generator=torch.Generator().manual_seed(call)))
            seen.append(str(table))
        return seen

    compiled = lambda step: ws.compile(step, backend="eager")  # noqa: E731
    assert trained(compiled) == trained(lambda step: step)
