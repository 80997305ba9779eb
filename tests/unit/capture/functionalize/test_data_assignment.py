"""``x.data = y`` in a step: a graph where the step has made `x`, and live where a parameter or a graph would change."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from wholestep.api.report.live_explanation import LiveExplanation
from wholestep.errors import CaptureError


class Pair:
    """A model, and another one whose weights it borrows."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.other = copy.deepcopy(self.model)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1)
        with torch.no_grad():
            self.other.weight.mul_(2)

    def exchange(self) -> None:
        for one, other in zip(self.model.parameters(), self.other.parameters(), strict=True):
            one.data, other.data = other.data, one.data


Step = Callable[[Pair, Tensor], Tensor]


def gradients_scaled(t: Pair, x: Tensor) -> Tensor:
    t.opt.zero_grad()
    loss = t.model(x).square().sum()
    loss.backward()
    for param in t.model.parameters():
        assert param.grad is not None
        param.grad.data = param.grad.data.clamp(-1, 1) * 0.5
    t.opt.step()
    return loss.detach()


def value_replaced(t: Pair, x: Tensor) -> Tensor:
    y = x * 1
    view = y[0]
    y.data = y * 3
    y.add_(1)
    return y.sum() + view.sum()


def detached_replaced(t: Pair, x: Tensor) -> Tensor:
    out = t.model(x)
    shown = out.detach()
    shown.data = shown * 2
    return shown.sum() + out.detach().sum()


def same_memory(t: Pair, x: Tensor) -> Tensor:
    t.model.weight.data = t.model.weight.data
    return t.model(x).detach().sum()


def evaluated_with_others(t: Pair, x: Tensor) -> Tensor:
    with torch.no_grad():
        t.exchange()
        out = t.model(x).sum()
        t.exchange()
    return out


def weights_scaled_for_a_while(t: Pair, x: Tensor) -> Tensor:
    held = t.model.weight.data
    t.model.weight.data = held * 3
    out = t.model(x).detach().sum()
    t.model.weight.data = held
    return out


def value_of_a_graph(t: Pair, x: Tensor) -> Tensor:
    out = t.model(x)
    loss = out.square().sum()
    out.data = out.data * 2
    (slope,) = torch.autograd.grad(loss, [t.model.weight])
    return slope.sum()


GRAPHS: tuple[Step, ...] = (gradients_scaled, value_replaced, detached_replaced, same_memory)
LIVE: tuple[Step, ...] = (evaluated_with_others, weights_scaled_for_a_while, value_of_a_graph)


def equals_eager(step: Step) -> bool:
    """Whether the compiled step is live; asserts that it gives what eager code gives."""
    eager, ours, compiled = Pair(), Pair(), ws.compile(step, backend="eager")
    for number in range(3):
        x = torch.full((2, 3), 1.0 + number)
        assert torch.equal(step(eager, x), compiled(ours, x))
        for one, other in zip(eager.model.parameters(), ours.model.parameters(), strict=True):
            assert torch.equal(one, other)
    return isinstance(compiled.explain(), LiveExplanation)


@pytest.mark.parametrize("step", GRAPHS, ids=lambda step: step.__name__)
def test_what_the_step_has_made_stands_for_the_other_value(step: Step) -> None:
    assert not equals_eager(step)


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize("step", LIVE, ids=lambda step: step.__name__)
def test_other_memory_of_an_input_or_in_a_graph_is_live(step: Step, may_go_live: bool) -> None:
    assert equals_eager(step)


def test_the_line_is_named() -> None:
    with pytest.raises(CaptureError, match=r"test_data_assignment\.py:\d+\nIt gives a \[2, 3\] other storage"):
        ws.compile(weights_scaled_for_a_while, fullgraph=True)(Pair(), torch.ones(2, 3))
