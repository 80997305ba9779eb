"""A training whose step takes numbers that change between calls, run eagerly and compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import wholestep as ws
from tests.harness.training import backward_and_step

CALLS = 7


def batch(number: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(number))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.temperature, self.weights, self.p, self.which = 1.0, [0.5, 1.0], 0.0, 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x) / self.temperature * self.weights[1]
        return out


@dataclass
class Training:
    """A model and an optimizer, and what a test sets between calls."""

    model: Net
    opt: torch.optim.Optimizer

    def update(self, loss: Tensor) -> Tensor:
        return backward_and_step(loss, self.opt).detach()

    def state(self) -> list[Tensor]:
        held = [one for state in self.opt.state.values() for one in state.values() if isinstance(one, Tensor)]
        return [*(param.detach() for param in self.model.parameters()), *held]


Step = Callable[..., Any]
Give = Callable[[Training, int], tuple[Any, ...]]
"""Sets what there is to set before a call, and gives its arguments after the batch."""


def trained(make: Callable[[Training], Step], give: Give, compiled: Callable[[Step], Step]) -> tuple[Any, list[Any]]:
    model = Net()
    training = Training(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    step = compiled(make(training))
    seen: list[Any] = []
    for number in range(CALLS):
        found = step(batch(number), *give(training, number))
        seen.append((found, [one.clone() for one in training.state()]))
    return step, seen


def assert_same(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    if isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        assert_same(list(found.values()), list(wanted.values()))
    else:
        assert torch.equal(found, wanted) if isinstance(wanted, Tensor) else found == wanted


def train_both(make: Callable[[Training], Step], give: Give) -> Any:
    """Trains by eager code and compiled, which has to be the same bits; gives the compiled step."""
    _, wanted = trained(make, give, lambda step: step)
    step, found = trained(make, give, lambda step: ws.compile(step, backend="eager"))
    assert_same(found, wanted)
    return step


def weighted(training: Training) -> Step:
    return lambda x, beta: training.update(training.model(x).square().mean() * beta)


def switched(training: Training) -> Step:
    return lambda x, number: training.update(training.model(x).abs().mean() * (2 if number % 3 == 2 else 1))


def numbers(training: Training, number: int) -> tuple[Any, ...]:
    return (number,)


def sets(change: Callable[[Training, int], object]) -> Give:
    def give(training: Training, number: int) -> tuple[Any, ...]:
        change(training, number)
        return ()

    return give
