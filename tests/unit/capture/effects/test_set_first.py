"""What a step sets before it asks for it decides nothing: a step in train mode and one in eval mode go by turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.harness.training import backward_and_step
from wholestep.api import dispatch

Decorate = Callable[[Any], Any]
ROUNDS = 5


def compiled(step: Any) -> Any:
    return ws.compile(step, backend="eager")


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))


def by_turns(decorate: Decorate) -> tuple[list[Any], list[Any]]:
    """What training and evaluating steps give by turns, with the modes that they leave, and the steps."""
    model, found = make_model(), []
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    @decorate
    def train(x: Tensor) -> Tensor:
        model.train()
        return backward_and_step(model(x).square().mean(), opt)

    @decorate
    def evaluate(x: Tensor) -> Tensor:
        model.eval()
        with torch.no_grad():
            return model(x).square().mean()

    for call in range(ROUNDS):
        torch.manual_seed(call)
        x = torch.randn(6, 4)
        for step in (train, evaluate, evaluate) if call % 2 else (train, evaluate):
            found.append((step(x).item(), [one.training for one in model.modules()], torch.get_rng_state().sum()))
        model[2].train()  # a part of it, between two calls
    return found, [train, evaluate]


@pytest.mark.parametrize("is_known", [True, False], ids=["by its key", "new"])
def test_training_and_evaluation_by_turns_are_a_trace_each_and_one_more(
    is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_known:
        monkeypatch.setattr(dispatch, "call_key", lambda call: object())
    wanted, _ = by_turns(lambda step: step)
    found, steps = by_turns(compiled)
    assert found == wanted
    assert [step.cache_info().traces for step in steps] == [2, 1]


class Factors:
    """Of which a trace asks for one."""

    def __init__(self) -> None:
        self.training = self.evaluation = 1.0


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize("asks", ["attribute", "vars", "getattr", "deep"])
def test_what_a_step_asks_for_first_decides(asks: str) -> None:
    """At first it decides nothing, and both traces of a capture are one graph."""

    def train(decorate: Decorate) -> list[float]:
        model, factors = nn.Sequential(nn.Linear(4, 2)), Factors()

        @decorate
        def step(x: Tensor) -> Tensor:
            flag = {
                "attribute": lambda: model.training, "vars": lambda: vars(model)["training"],
                "getattr": lambda: getattr(model, "train" + "ing"), "deep": lambda: model[0].training,
            }[asks]()  # fmt: skip
            factor = factors.training if flag else factors.evaluation
            model.eval()
            return (model(x) * factor).sum().detach()  # with its graph the step would be live in any case

        with torch.no_grad():
            model[0].weight.fill_(1.0)
            model[0].bias.fill_(0.0)
        found = []
        for call in range(6):
            model.train(call % 2 == 0)
            found.append(step(torch.ones(1, 4)).item())
            if call == 2:
                factors.training = 3.0
        return found

    assert train(compiled) == train(lambda step: step) == [8.0, 8.0, 8.0, 8.0, 24.0, 8.0]


class Phase:
    """What a loop of the user's has at hand."""

    def __init__(self) -> None:
        self.name, self.number = "none", 0


def test_attributes_of_any_object() -> None:
    def train(decorate: Decorate) -> tuple[list[Any], Any]:
        phase = Phase()

        @decorate
        def step(x: Tensor) -> Tensor:
            phase.name = "train"
            phase.number = 3
            return x * phase.number

        found = []
        for call in range(7):
            phase.name, phase.number = f"call {call}", call
            if call > 4:  # it is there again after the call
                del phase.name
            found.append((step(torch.ones(2)).tolist(), phase.name, phase.number))
        return found, step

    wanted, _ = train(lambda step: step)
    found, step = train(compiled)
    assert found == wanted
    assert step.cache_info().traces == 1


def test_what_was_not_there_is_not_there_after_an_error() -> None:
    phase = Phase()

    @compiled
    def step(rows: Tensor) -> Tensor:
        phase.name = "train"
        return torch.ones(3)[rows]

    step(torch.tensor([1]))
    del phase.name
    with pytest.raises((IndexError, RuntimeError)):
        step(torch.tensor([9]))
    assert not hasattr(phase, "name")


def test_an_error_leaves_what_was_set_as_it_was() -> None:
    model = make_model()

    @compiled
    def evaluate(x: Tensor, rows: Tensor) -> Tensor:
        model.eval()
        return model(x)[rows].detach()

    x = torch.randn(6, 4)
    for _ in range(2):
        evaluate(x, torch.tensor([1]))
        model.train()
    with pytest.raises((IndexError, RuntimeError)):
        evaluate(x, torch.tensor([9]))
    assert all(one.training for one in model.modules())
    assert evaluate.cache_info().traces == 1
