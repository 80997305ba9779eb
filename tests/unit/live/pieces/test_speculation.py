"""A value asked for between forward and backward: the backward runs ahead of it, its gradients are held back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.unit.live.both import CALLS, Compiled, Step, Training, batch, train_both


def guarded(decide: Callable[[int, float], str]) -> Callable[[Training], Step]:
    """A step that looks at its loss and then goes one of several ways."""

    def make(training: Training) -> Step:
        calls = iter(range(100))

        def step(x: Tensor) -> Tensor | None:
            loss = training.model(x).square().mean()
            way = decide(next(calls), loss.item())
            if way == "nothing":
                return None
            if way == "returns":
                return loss.detach()
            if way == "twice":
                loss = loss * 2
            if way == "kept":
                loss.backward(retain_graph=True)
            if way == "raises":
                raise ValueError(way)
            training.notes.append(float(loss))
            return training.update(loss)

        def caught(x: Tensor) -> Tensor | str | None:
            try:
                return step(x)
            except ValueError as error:
                return str(error)

        return caught

    return make


def test_a_guard_is_two_pieces_and_no_eager_call() -> None:
    compiled = Compiled()
    live = train_both(guarded(lambda call, loss: ""), compiled=compiled)
    assert len(compiled.pieces) == 2
    assert compiled.launches == 2 * (CALLS - 1)
    assert live.stats.executed == len(live.pieces[0].path.records) + 2  # the first call, and its reads


@pytest.mark.parametrize("way", ["nothing", "returns", "twice", "kept", "raises"])
def test_python_goes_another_way(way: str) -> None:
    train_both(guarded(lambda call, loss: way if call in (3, 4, 7) else ""), calls=10)


def test_gradients_that_are_cleared_behind_the_read_stay_where_it_returns() -> None:
    def make(training: Training) -> Step:
        calls = iter(range(100))

        def step(x: Tensor) -> float:
            loss = training.model(x).mean()
            value = loss.item()
            if next(calls) in (4, 6):
                return value
            training.opt.zero_grad()
            loss.backward()
            training.opt.step()
            return value

        return step

    compiled = Compiled()
    train_both(make, calls=10, compiled=compiled)
    assert compiled.launches > 10


def by_hand(training: Training) -> None:
    for param in training.model.parameters():
        param.grad = None


CLEARS: dict[str, Callable[[Training], object]] = {
    "by the optimizer": lambda training: training.opt.zero_grad(),
    "to zeros": lambda training: training.opt.zero_grad(set_to_none=False),
    "by the module": lambda training: training.model.zero_grad(),
    "by hand": by_hand,
}


@pytest.mark.parametrize("how", CLEARS)
def test_gradients_that_are_cleared_first_are_gone(how: str) -> None:
    """In the first call there are none, so it is not seen that they are cleared."""

    def make(training: Training) -> Step:
        def step(x: Tensor) -> Tensor:
            CLEARS[how](training)
            loss = training.model(x).square().mean()
            training.notes.append(loss.item())
            loss.backward()
            training.opt.step()
            return loss.detach()

        return step

    compiled = Compiled()
    train_both(make, compiled=compiled)
    assert compiled.launches > 0


def test_gradients_add_up() -> None:
    def make(training: Training) -> Step:
        calls = iter(range(100))

        def step(x: Tensor) -> float:
            loss = training.model(x).mean()
            value = loss.item()
            loss.backward()
            if next(calls) % 2:
                training.opt.step()
                training.opt.zero_grad()
            return value

        return step

    train_both(make, calls=10)


def accumulating(where: str) -> Callable[[Training], Step]:
    """A step that updates in every third call, and looks at gradients of the calls before."""

    def make(training: Training) -> Step:
        calls = iter(range(100))

        def step(x: Tensor) -> Tensor:
            loss, params = training.model(x).square().mean(), list(training.model.parameters())
            grads = [p.grad for p in params] if where == "in front" else []
            training.notes.append(loss.item())
            if where == "behind":
                grads = [p.grad for p in params]
            training.notes.append([grad is None for grad in grads])
            loss.backward()
            training.notes.append([None if grad is None else grad.sum().item() for grad in grads])
            if next(calls) % 3 == 2:
                training.opt.step()
                training.opt.zero_grad()
            return loss.detach()

        return step

    return make


@pytest.mark.parametrize("where", ["in front", "behind"])
def test_gradients_of_calls_before_are_read_between_forward_and_backward(where: str) -> None:
    train_both(accumulating(where), calls=10)


def test_a_parameter_is_frozen_behind_the_read() -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor) -> float:
            loss = training.model(x).mean()
            value = loss.item()
            training.model.last.bias.requires_grad_(False)
            training.update(loss)
            training.model.last.bias.requires_grad_(True)
            return value

        return step

    train_both(make)


def test_a_parameter_is_written_behind_the_read() -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor) -> float:
            loss = training.model(x).mean()
            value = loss.item()
            with torch.no_grad():
                training.model.last.bias.mul_(0.5)  # the backward does not read it
            training.update(loss)
            return value

        return step

    train_both(make)


def test_draws_behind_the_read_come_behind_those_before_it() -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor) -> float:
            loss = training.model(x).mean()
            value = loss.item()
            scale = float(torch.rand(()))
            if scale > 0.5:
                training.update(loss)
            else:
                training.notes.append(loss.detach())
            return value * scale

        return step

    train_both(make, batch, calls=12)


def test_what_an_earlier_forward_gave_is_there_when_python_goes_another_way() -> None:
    """The output of the first half goes into the piece with the forward of the second, which runs again."""

    def make(training: Training) -> Step:
        calls = iter(range(100))

        def step(x: Tensor) -> None:
            call, first = next(calls), training.model.first
            for number, half in enumerate((x, x + 1)):
                out = torch.tanh(torch.nn.functional.linear(half, first.weight, first.bias))
                loss = out.square().mean()
                if half.sum() < -100 or (call == CALLS - 1 and number == 1):
                    training.notes.append([p.grad is None for p in training.model.parameters()])
                loss.backward()
                training.notes.append(str(call))
                out.detach().abs().amax()
            training.opt.step()
            training.opt.zero_grad()

        return step

    train_both(make)


class Pair:
    """A generator and a critic, each with an optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.generator, self.critic = nn.Linear(4, 3), nn.Linear(3, 1)
        self.opts = [torch.optim.Adam(one.parameters(), lr=0.01) for one in (self.generator, self.critic)]
        self.notes: list[float] = []

    def step(self, x: Tensor) -> Tensor:
        self.notes.append(float(self.generator.weight.sum()))
        made = self.generator(x)
        loss = self.critic(made.detach()).square().mean()
        self.opts[1].zero_grad()
        loss.backward()
        self.opts[1].step()
        other = -self.critic(made).mean()
        self.opts[0].zero_grad()
        other.backward()
        self.opts[0].step()
        return (loss + other).detach()


def test_what_a_later_backward_goes_through_keeps_its_graph() -> None:
    eager, ours = Pair(), Pair()
    compiled = ws.compile(ours.step, backend="eager")
    for number in range(CALLS):
        x = torch.full((2, 4), 1.0 + number)
        assert torch.equal(eager.step(x), compiled(x))
    assert ours.notes == eager.notes
