"""A value asked for between forward and backward that decides what comes next: the forward runs again with it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.live.both import CALLS, Compiled, Step, Training, train_both
from wholestep.live.pieces.forward import Before


def matching(training: Training) -> Step:
    """The loss pairs rows by what numpy says of the outputs."""

    def step(x: Tensor) -> Tensor:
        out = training.model(x)
        order = torch.from_numpy(np.argsort(out.detach().numpy()[:, 0]).copy())
        return training.update((out[order, 0] * torch.arange(3.0)).mean())

    return step


def test_a_forward_runs_for_its_values_and_again_with_the_backward() -> None:
    compiled = Compiled()
    live = train_both(matching, compiled=compiled)
    assert len(compiled.pieces) == 2
    assert compiled.launches == 2 * (CALLS - 1)
    assert [piece.spec.span for piece in live.pieces] == [(0, 2), (0, len(live.pieces[0].path.records))]


def episode(training: Training) -> Step:
    """A policy whose actions are drawn and decide its next input."""

    def step(x: Tensor) -> Tensor:
        terms = []
        for _ in range(3):
            out = torch.sigmoid(training.model(x))
            terms.append(out.log().mean())
            x = x + (1.0 if torch.bernoulli(out[0].detach()).item() else -1.0)
        return training.update(torch.stack(terms).sum())

    return step


def test_several_reads_are_pieces_of_one_forward() -> None:
    compiled = Compiled()
    live = train_both(episode, compiled=compiled, calls=12)
    assert compiled.launches > 12
    assert live.is_recorded


WAYS = ("nothing", "returns", "raises", "draws", "writes", "eager", "frozen", "twice", "statistics", "seeds")


def going(ways: Callable[[int], str]) -> Callable[[Training], Step]:
    """A step that goes one of several ways after a read of its forward."""

    def make(training: Training) -> Step:
        calls = iter(range(100))

        def step(x: Tensor) -> Any:
            model, way = training.model, ways(next(calls))
            out = model(x)
            index = int(out.detach().argmax())
            if way == "nothing":
                return None
            if way == "returns":
                return out, index
            if way == "raises":
                raise ValueError(way)
            if way == "draws":
                training.notes.append(torch.rand(2))
            if way == "writes":
                with torch.no_grad():
                    model.last.bias.mul_(0.5)  # the backward does not read it
            if way == "eager":
                training.notes.append(np.asarray((out * index).tolist()).sum())
            if way == "frozen":
                model.last.bias.requires_grad_(False)
            if way == "statistics":
                model.norm.num_batches_tracked.add_(1)
            if way == "seeds":
                torch.manual_seed(index)
            loss = out.flatten()[torch.tensor([index])].sum() + model.dropout(out).mean()
            if way == "twice":
                loss.backward(retain_graph=True)
            training.notes.append(training.update(loss).item())
            model.last.bias.requires_grad_(True)
            return index

        def caught(x: Tensor) -> Any:
            try:
                return step(x)
            except ValueError as error:
                return str(error)

        return caught

    return make


@pytest.mark.parametrize("way", WAYS)
def test_python_goes_another_way(way: str) -> None:
    compiled = Compiled()
    train_both(going(lambda call: way if call in (3, 4, 7) else ""), calls=10, compiled=compiled)
    assert compiled.launches >= 2 * 5


@pytest.mark.parametrize("way", WAYS)
def test_python_always_goes_that_way(way: str) -> None:
    train_both(going(lambda call: way), calls=6)


@pytest.mark.parametrize("seed", range(20))
def test_python_goes_any_way(seed: int) -> None:
    draw = random.Random(seed)
    ways = [draw.choice(["", "", "", *WAYS]) for _ in range(16)]
    train_both(going(lambda call: ways[call]), calls=16)


def test_what_cannot_be_repeated_runs_first() -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor) -> None:
            training.opt.zero_grad()
            with torch.no_grad():
                training.model.last.bias.mul_(0.5)
            training.update(training.model(x).mean())
            loss = training.model(x).square().mean()
            if loss.item() < 1e9:
                training.update(loss)

        return step

    compiled = Compiled()
    train_both(make, compiled=compiled)
    assert compiled.launches == 3 * (CALLS - 1)  # all up to the update, the loss with its backward, the other update


def test_gradients_that_are_asked_for_twice() -> None:
    """A forward whose graph is kept over a read: by the gradients of each of two losses."""

    def make(training: Training) -> Step:
        def step(x: Tensor) -> None:
            params = list(training.model.parameters())
            out = training.model(x)
            one, two = out.mean(), out.square().mean()
            first = torch.autograd.grad(one, params, retain_graph=True)
            second = torch.autograd.grad(two, params, retain_graph=True)
            agree = sum((a * b).sum() for a, b in zip(first, second, strict=True))
            training.update(one + two if agree.item() > 0 else one - two)  # type: ignore[union-attr]

        return step

    compiled = Compiled()
    train_both(make, calls=10, compiled=compiled)
    assert compiled.launches > 10


def test_a_module_in_two_states() -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor) -> None:
            training.model.train()
            training.update(training.model(x).mean())
            training.model.eval()
            with torch.no_grad():
                training.notes.append(training.model(x).mean().item())

        return step

    compiled = Compiled()
    train_both(make, compiled=compiled)
    assert compiled.launches == 2 * (CALLS - 1)


def test_an_optimizer_that_changes_between_two_steps() -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor) -> None:
            training.update(training.model(x).mean())
            training.opt.param_groups[0]["lr"] *= 0.5
            training.notes.append(training.update(training.model(x).mean()).item())

        return step

    compiled = Compiled()
    train_both(make, compiled=compiled)
    assert compiled.launches == 2 * (CALLS - 1)


def test_before_puts_back_the_generators_of_the_user() -> None:
    def make(training: Training) -> Step:
        own = torch.Generator().manual_seed(3)

        def step(x: Tensor) -> None:
            out = training.model(x) + torch.rand(3, 1, generator=own) * training.model.last.bias
            order = torch.from_numpy(np.argsort(out.detach().numpy()[:, 0]).copy())
            training.notes.append(own.get_state())
            training.update((out[order, 0] * torch.arange(3.0)).mean())

        return step

    train_both(make)
    assert Before().put_back() == ()


def paired(out: Tensor) -> Tensor:
    """Nobody holds the outputs any more when their backward comes."""
    order = torch.from_numpy(np.argsort(out.detach().numpy()[:, 0]).copy())
    return (out[order, 0] * torch.arange(3.0)).mean()


def test_what_python_has_let_go_does_not_keep_the_graph() -> None:
    def make(training: Training) -> Step:
        return lambda x: training.update(paired(training.model(x)))

    compiled = Compiled()
    train_both(make, compiled=compiled)
    assert compiled.launches == 2 * (CALLS - 1)


def test_a_generator_that_is_seeded_behind_the_read_stays_so() -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor) -> Tensor:
            out = training.model(x)
            training.notes.append(out.detach().tolist())
            torch.manual_seed(7)
            return training.update(out[torch.tensor([0, 2])].mean())

        return step

    compiled = Compiled()
    train_both(make, compiled=compiled)
    assert compiled.launches == 2 * (CALLS - 1)


def writing(get: Callable[[Training], Tensor]) -> Callable[[Training], Step]:
    """The first call computes the loss, a read; then something is written that the forward has read."""

    def make(training: Training) -> Step:
        def step(x: Tensor) -> Tensor:
            out = training.model(x)
            training.notes.append(out.detach().tolist())
            get(training).mul_(0.5)
            return training.update(paired(out))

        return step

    return make


@pytest.mark.parametrize(
    "get",
    [lambda training: training.model.first.weight.data, lambda training: training.model.first.weight.data[1:].view(-1)],
    ids=["data", "part"],
)
def test_what_is_written_through_another_tensor_on_its_memory_is_put_back(get: Callable[[Training], Tensor]) -> None:
    compiled = Compiled()
    train_both(writing(get), compiled=compiled)
    assert compiled.launches >= 2 * (CALLS - 1)


@pytest.mark.parametrize("way", ["itself", "part", "list"])
def test_a_gradient_that_is_scaled_in_front_of_a_forward_is_scaled_once(way: str) -> None:
    """Only its parameter leads to it, so nothing would put it back before the forward runs again."""

    def make(training: Training) -> Step:
        def step(x: Tensor) -> None:
            model, opt = training.model, training.opt
            model(x).mean().backward()
            weight = model.first.weight
            assert weight.grad is not None
            if way == "list":
                torch._foreach_mul_([weight.grad, model.last.weight.grad], 0.5)
            else:
                (weight.grad if way == "itself" else weight.grad.data[1:].view(-1)).mul_(0.5)
            paired(model(x)).backward()
            opt.step()
            opt.zero_grad()

        return step

    compiled = Compiled()
    train_both(make, compiled=compiled)
    assert compiled.launches >= 2 * (CALLS - 1)


def test_a_value_of_an_earlier_piece_that_a_forward_writes_to_is_put_back() -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor) -> Tensor:
            scale = training.model.last.bias.detach() * 2.0
            training.notes.append(scale.item())  # what is recorded runs
            out = training.model(x) * scale.view(-1).add_(1.0)
            loss = paired(out)  # a read: the forward runs for its values
            training.notes.append(scale)
            return training.update(loss)

        return step

    train_both(make)


@pytest.mark.parametrize("kept", ["value", "view", "array"])
def test_a_value_that_is_written_to_behind_a_read_is_written_where_it_is_held(kept: str) -> None:
    """The forward runs again with its backward, and makes the value anew, which somebody holds by then."""

    def make(training: Training) -> Step:
        def step(x: Tensor) -> None:
            out = training.model(x)
            average = out.detach().mean(0) * 0.5
            held = {"value": average, "view": average.view(1, 1), "array": average}[kept]
            training.notes.append(float(average))
            average.mul_(0.9)
            training.notes.append(held.numpy() if kept == "array" else held)
            training.update(paired(out))
            average.add_(1.0)

        return step

    train_both(make, calls=8)


def test_an_output_that_is_written_to_behind_a_read_is_written_where_it_is_held() -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor) -> Tensor:
            out = training.model(x) * 2.0
            training.notes.append(out.sum().item())
            out.mul_(0.5)
            training.update(paired(out))
            return out.detach()

        return step

    train_both(make, calls=8)


def test_a_call_off_the_known_way_behind_a_backward_that_ran_ahead_is_noted_anew() -> None:
    """The tensors that its backward brought are none of this run's by then; the call had counted on them."""

    def make(training: Training) -> Step:
        def step(x: Tensor) -> None:
            training.notes.append(training.model.first.weight[0, 0].item())
            training.opt.zero_grad()
            loss = training.model(x).square().mean()
            training.notes.append(loss.item())
            loss.backward()
            training.model.train(not training.model.training)
            training.opt.step()

        return step

    train_both(make, calls=12)


def test_a_seed_between_a_forward_and_another_read_stays_where_it_stands() -> None:
    """Reads that draw nothing leave open where the forward ended: what draws after the seed draws of the seed."""

    def make(training: Training) -> Step:
        def step(x: Tensor) -> Tensor:
            out = training.model(x)
            training.notes.append(out.detach().tolist())
            torch.manual_seed(70)
            training.notes.append((out * 2.0).detach().tolist())
            loss = training.update(paired(out) + training.model(x).mean())
            training.notes.append(torch.rand(()).item())
            return loss

        return step

    train_both(make, calls=8)
