"""FSDP: weights that a step exchanges for averages, by each of the ways of eager code; graphs of gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import wholestep as ws

pytestmark = pytest.mark.ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


Averages = list[Tensor]


def by_data(model: nn.Module, averages: Averages) -> None:
    for param, average in zip(model.parameters(), averages, strict=True):
        param.data, average.data = average.data, param.data


def by_data_and_a_list(model: nn.Module, averages: Averages) -> None:
    for number, param in enumerate(model.parameters()):
        param.data, averages[number] = averages[number], param.data


def by_copies(model: nn.Module, averages: Averages) -> None:
    for param, average in zip(model.parameters(), averages, strict=True):
        kept = param.data.clone()
        param.data.copy_(average)
        average.copy_(kept)


def for_an_evaluation(model: nn.Module, averages: Averages) -> None:
    kept = [param.data for param in model.parameters()]
    for param, average in zip(model.parameters(), averages, strict=True):
        param.data = average.clone()
    averages[0] = averages[0] + model(torch.ones(1, 4)).sum().item()
    for param, one in zip(model.parameters(), kept, strict=True):
        param.data = one


def with_a_row_held(model: nn.Module, averages: Averages) -> None:
    """A row keeps the memory that its parameter had, and the parameter has its own."""
    param = model.first.weight
    with torch.no_grad():
        row = param[0]
        param.data = averages[0].clone()
        averages[0] = averages[0] + row + param


def for_a_tensor_that_is_kept(model: nn.Module, averages: Averages) -> None:
    """It is the memory of the parameter from then on, so that an update is seen in it."""
    for number, param in enumerate(model.parameters()):
        averages[number] = param.data * 0.5
        param.data = averages[number]


EXCHANGES = [by_data, by_data_and_a_list, by_copies, for_an_evaluation, with_a_row_held, for_a_tensor_that_is_kept]


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def trained(exchange: Callable[[nn.Module, Averages], None], where: str, strategy: ws.FSDP | None) -> list[Tensor]:
    torch.manual_seed(0)
    model = Net()
    opt = torch.optim.AdamW(model.parameters(), lr=0.02)
    averages: Averages = [param.detach().clone() + 1 for param in model.parameters()]

    def step(x: Tensor, y: Tensor) -> None:
        if where == "first":
            exchange(model, averages)
        nn.functional.cross_entropy(model(x), y).backward()
        if where == "before the update":
            exchange(model, averages)
        opt.step()
        if where == "last":
            exchange(model, averages)
        opt.zero_grad()

    compiled = step if strategy is None else ws.compile(step, strategy=strategy)
    for call in range(3):
        torch.manual_seed(call)
        compiled(torch.randn(4, 4), torch.randint(3, (4,)))
    return [whole(one) for one in [*model.parameters(), *averages]]


def difference(exchange: Callable[[nn.Module, Averages], None], where: str) -> float:
    pairs = zip(trained(exchange, where, ws.FSDP()), trained(exchange, where, None), strict=True)
    return max((one - other).abs().max().item() for one, other in pairs)


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize("where", ["first", "before the update", "last"])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_what_had_the_memory_keeps_its_values(pool2: Any, exchange: Any, where: str, may_go_live: bool) -> None:
    assert max(pool2.run(difference, exchange, where)) < 1e-5


AFTER_AN_UPDATE = ("update", "slopes", "slopes last", "error")


def raises(grad: Tensor) -> None:
    raise ZeroDivisionError


def penalised(strategy: ws.FSDP | None, between: str) -> list[Tensor]:
    """A penalty on the gradient of the inputs; between it and its backward an update of other gradients, another
    forward, or nothing; or no loss beside it, or a graph made after it; or a gradient of the gradient, and none of
    parameters, before an update, or an error in that. After each call an evaluation."""
    torch.manual_seed(0)
    model, notes = Net(), list[float]()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> None:
        notes.append(x.sum().item())
        inputs = x.clone().requires_grad_()
        out = model(inputs)
        (slope,) = torch.autograd.grad(out.sum(), inputs, create_graph=True)
        if between in AFTER_AN_UPDATE:
            if between == "error":
                slope.register_hook(raises)
                with suppress(ZeroDivisionError):
                    torch.autograd.grad(slope.square().sum(), inputs)
            elif between != "update":
                (slope,) = torch.autograd.grad(slope.square().sum(), inputs, create_graph=True)
            notes.append(slope.sum().item())
            opt.step()
            if between != "slopes last":
                nn.functional.cross_entropy(model(inputs), y).backward()
        else:
            if between == "forward":
                out = model(inputs)
            penalty = slope.square().mean()
            (penalty if between == "no other loss" else nn.functional.cross_entropy(out, y) + penalty).backward()
            if between == "another graph":
                torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
            opt.step()
        opt.zero_grad()

    compiled = step if strategy is None else ws.compile(step, strategy=strategy)
    for call in range(3):
        torch.manual_seed(call)
        if between in AFTER_AN_UPDATE:
            torch.nn.functional.cross_entropy(model(torch.randn(4, 4)), torch.randint(3, (4,))).backward()
        compiled(torch.randn(4, 4), torch.randint(3, (4,)))
        with torch.no_grad():
            notes.append(model(torch.ones(1, 4)).sum().item())
    return [*map(whole, model.parameters()), torch.tensor(notes)]


def difference_of_penalties(between: str) -> float:
    pairs = zip(penalised(ws.FSDP(), between), penalised(None, between), strict=True)
    return max((one - other).abs().max().item() for one, other in pairs)


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize(
    "between", ["nothing", "update", "forward", "no other loss", "another graph", *AFTER_AN_UPDATE[1:]]
)
def test_a_backward_goes_through_the_graph_of_another(pool2: Any, between: str, may_go_live: bool) -> None:
    """Torch drops gathered parameters after the first one, and after a forward, and the second goes through them. They
    are gathered for it, and dropped after it: what comes after an update gathers them anew."""
    assert max(pool2.run(difference_of_penalties, between)) < 1e-5
