"""Whatever a recorded call reads of Python is read when it is called, not when it runs. What Python writes to a view
that a call has given is written to what it is a view of."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.live.both import CALLS, AsAGraph, Compiled, Step, Training, train_both, train_by_stages

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
}


def moves_rate(training: Training) -> None:
    training.opt.param_groups[0]["lr"] *= 0.7


def moves_decay(training: Training) -> None:
    training.opt.param_groups[0]["weight_decay"] += 0.01


def flips_training(training: Training) -> None:
    training.model.train(not training.model.training)


def moves_temperature(training: Training) -> None:
    training.model.temperature *= 1.5


def moves_dropout(training: Training) -> None:
    training.model.dropout.p = 0.9 - training.model.dropout.p


def moves_momentum(training: Training) -> None:
    training.model.norm.momentum = 0.9 - (training.model.norm.momentum or 0.0)


def drops_state(training: Training) -> None:
    training.opt.state.clear()


def scales_state(training: Training) -> None:
    for state in training.opt.state.values():
        for tensor in state.values():
            if isinstance(tensor, Tensor) and tensor.dim():
                tensor.mul_(0.5)


def loads_itself(training: Training) -> None:
    training.opt.load_state_dict(training.opt.state_dict())


def splits_groups(training: Training) -> None:
    params = training.opt.param_groups[0]["params"]
    if len(params) > 1:
        training.opt.add_param_group({"params": [params.pop()], "lr": 0.3})


def scales_a_weight(training: Training) -> None:
    training.model.last.weight.data.mul_(1.01)


def freezes(training: Training) -> None:
    training.model.first.weight.requires_grad_(not training.model.first.weight.requires_grad)


def nothing(training: Training) -> None:
    pass


MOVES = [
    moves_rate, moves_decay, flips_training, moves_temperature, moves_dropout, moves_momentum, drops_state,
    scales_state, loads_itself, splits_groups, scales_a_weight, freezes, nothing,
]  # fmt: skip
PLACES = ("before", "behind the forward", "behind the backward", "behind the update")


def moved(moves: dict[str, Callable[[Training], None]]) -> Callable[[Training], Step]:
    """A step that moves something in some places."""

    def make(training: Training) -> Step:
        def step(x: Tensor) -> Tensor:
            moves[PLACES[0]](training)
            loss = training.model(x).square().mean()
            moves[PLACES[1]](training)
            if loss.requires_grad:
                loss.backward()
            moves[PLACES[2]](training)
            training.opt.step()
            moves[PLACES[3]](training)
            training.opt.zero_grad()
            return loss

        return step

    return make


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
def test_what_moves_in_one_place(move: Callable[[Training], None], place: str, optimizer: str) -> None:
    moves = dict.fromkeys(PLACES, nothing) | {place: move}
    train_both(moved(moves), training=lambda: Training(OPTIMIZERS[optimizer]), calls=5)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(MOVES), min_size=4, max_size=4), st.sampled_from(sorted(OPTIMIZERS)))
def test_what_moves_in_every_place(moves: list[Callable[[Training], None]], optimizer: str) -> None:
    train_both(moved(dict(zip(PLACES, moves, strict=True))), training=lambda: Training(OPTIMIZERS[optimizer]), calls=5)


def in_turn(training: Training, changed: Callable[[Tensor], Tensor] = lambda loss: loss) -> Step:
    """The first layer and the rest: these are frozen while that one trains, and until the next call."""
    first, rest = training.model.first, [training.model.norm, training.model.last]

    def step(x: Tensor) -> Tensor:
        hidden = first(x)
        for one in rest:
            one.requires_grad_(True)
        training.update(training.model.last(hidden.detach().relu()).square().mean())
        for one in rest:
            one.requires_grad_(False)
        loss = training.update(changed(training.model.last(hidden.relu()).exp().mean()))
        training.notes.append(loss.item())
        return loss.detach()

    return step


@pytest.mark.parametrize("goes_another_way", [False, True])
def test_what_is_frozen_at_the_end_was_trained_before(goes_another_way: bool) -> None:
    """Python sees the flag at once. The calls before it run later, as a piece or one by one, with the one they had."""

    def make(training: Training) -> Step:
        def step(x: Tensor) -> Tensor:
            loss = training.update(training.model(x).square().mean())
            training.model.first.requires_grad_(False)
            training.notes.append(training.model.first.weight.requires_grad)
            return (loss * 2 if goes_another_way and len(training.notes) == 4 else loss).detach()

        return step

    train_both(make, between=lambda training, call: training.model.first.requires_grad_(True))


def test_what_is_frozen_in_turn_is_one_piece() -> None:
    live = train_both(in_turn)
    lengths = [one.spec.span[1] - one.spec.span[0] for one in live.pieces]
    assert [one.launches for one in live.pieces] == [CALLS - 2] * 2
    assert lengths[0] > 20
    assert lengths[1] == 1, "the copy of the loss, after it was read"


def test_what_is_frozen_in_turn_is_replayed() -> None:
    """A call that goes another way runs what is recorded one by one."""

    def make(training: Training) -> Step:
        losses: list[None] = []

        def doubled_once(loss: Tensor) -> Tensor:
            losses.append(None)
            return loss * 2 if len(losses) == 4 else loss

        return in_turn(training, doubled_once)

    train_both(make)


def test_what_is_frozen_in_turn_is_so_in_a_graph() -> None:
    train_by_stages(in_turn, calls=6)


@pytest.mark.parametrize("move", [flips_training, moves_dropout, moves_temperature, moves_rate, freezes])
def test_what_moves_behind_a_call_whose_piece_has_guards(move: Callable[[Training], None]) -> None:
    """A piece runs at once where its guards see no change, else as it was when its calls were recorded."""

    def make(training: Training) -> Step:
        step = moved(dict.fromkeys(PLACES, nothing) | {"behind the forward": move})(training)

        def reads(x: Tensor) -> Tensor:
            loss = step(x)
            training.notes.append(loss.item())
            return loss.detach()

        return reads

    train_by_stages(make, calls=8)


def test_a_rate_that_a_scheduler_moves_behind_the_update_is_still_one_launch() -> None:
    def make(training: Training) -> Step:
        scheduler = torch.optim.lr_scheduler.StepLR(training.opt, 2, 0.5)

        def step(x: Tensor) -> Tensor:
            loss = training.update(training.model(x).mean())
            scheduler.step()
            return loss

        return step

    compiled = Compiled()
    train_both(make, compiled=compiled)
    assert len(compiled.pieces) == 1
    assert compiled.launches == 5


def test_a_rate_that_moves_between_two_updates_of_one_call_is_that_of_each() -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor) -> Tensor:
            training.opt.param_groups[0]["lr"] = 0.5
            training.update(training.model(x).mean())
            training.opt.param_groups[0]["lr"] *= 0.1
            return training.update(training.model(x).mean())

        return step

    for kind in ("sgd", "adamw"):
        train_both(make, training=lambda kind=kind: Training(OPTIMIZERS[kind]))  # type: ignore[misc]


def test_an_array_that_is_written_behind_a_recorded_call() -> None:
    def make(training: Training) -> Step:
        array = np.zeros((3, 4), np.float32)

        def step(x: Tensor) -> Tensor:
            array[:] = x.numpy()
            loss = training.update(training.model(torch.from_numpy(array)).mean())
            array[:] = 7.0
            return loss

        return step

    train_both(make)


def test_an_array_that_is_written_behind_the_first_call() -> None:
    """The call is one of a module, which is known at once."""

    def make(training: Training) -> Step:
        array = np.zeros((3, 4), np.float32)

        def step(x: Tensor) -> Tensor:
            array[:] += 1.0
            loss = training.update(training.model(torch.from_numpy(array)).mean())
            array[:] *= 3.0
            return loss

        return step

    live = train_both(make)
    assert live.stats.launches > 0


def test_python_numbers_are_read_when_they_are_given() -> None:
    def make(training: Training) -> Step:
        weights = [1.0, 2.0]

        def step(x: Tensor) -> Tensor:
            loss = training.model(x).mean() * weights[0] + training.model(x).mean() * weights[1]
            weights[0] = random.random()
            return training.update(loss)

        return step

    train_both(make)


def test_state_that_an_optimizer_makes_is_there_behind_its_step() -> None:
    def make(training: Training) -> Step:
        calls = iter(range(100))

        def step(x: Tensor) -> None:
            if next(calls) == 3:
                training.opt.state.clear()
            training.update(training.model(x).mean())
            training.notes.append(len(training.opt.state))

        return step

    train_both(make)


class Both(torch.nn.Module):
    """Gives a tensor with a graph, and a row of it without one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.inner(x)
        return out, out.detach()[0]


def test_what_a_module_gives_on_one_memory_is_written_to_behind_a_read() -> None:
    module = Both()

    def make(training: Training) -> Step:
        both = copy.deepcopy(module)

        def step(x: Tensor) -> None:
            out, row = both(x)
            loss = out.square().mean()
            loss.backward()
            row.mul_(0.5 + loss.tolist() % 1.0)
            training.notes.append((row.requires_grad, row.clone(), out.detach().clone()))

        return step

    train_by_stages(make)


ROWS = {
    "of what has a graph": lambda training, out: out.detach()[0],
    "of what has a graph, in its shape": lambda training, out: out.detach().t().view_as(out)[0],
    "of a parameter": lambda training, out: training.model.first.weight.data[0],
}


@pytest.mark.parametrize("row_of", ROWS.values(), ids=ROWS)
def test_a_view_without_a_graph_is_written_to_behind_a_read(row_of: Any) -> None:
    """Graphs make views without gradients, of what may require grad, and of what a parameter was before an update."""

    def make(training: Training) -> Step:
        def step(x: Tensor) -> Tensor:
            out = training.model(x)
            loss = training.update(out.square().mean())
            row = row_of(training, out)
            row.mul_(0.5 + loss.tolist() % 1.0)
            training.notes.append((row.requires_grad, row.clone()))
            return out.detach()

        return step

    train_by_stages(make)


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("known", [0, 3])
def test_a_view_brings_what_it_views_into_a_graph(reads: bool, known: int) -> None:
    """In a way that is known, and where that happens on a new one after a read."""

    def make(training: Training) -> Step:
        calls = iter(range(100))

        def step(x: Tensor) -> Tensor:
            out = training.model(x).detach()
            row = out[0]
            if reads:
                training.notes.append(row.tolist())
            if next(calls) >= known:
                row.mul_(training.model.last.weight.sum())
                training.notes.append(out.requires_grad)
                training.update(out.sum())
            return row.detach()

        return step

    train_both(make, compiled=AsAGraph())


def test_memory_that_is_exchanged_is_not_that_of_a_view() -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor) -> Tensor:
            weight = training.model.last.weight
            row = weight.data
            weight.data = row * 0.5
            loss = training.update(training.model(x).mean())
            row.mul_(2.0)
            training.notes.append((loss.tolist(), row.clone()))
            return loss.detach()

        return step

    train_both(make)


def test_views_of_what_a_forward_gave_that_ran_again_are_on_the_memory_that_python_holds() -> None:
    def make(training: Training) -> Step:
        calls = iter(range(100))

        def step(x: Tensor) -> Tensor:
            number = next(calls)
            out = training.model.first(x)
            loss = out.square().mean() * (0.5 + out.max().tolist() % 1.0)  # runs the forward
            loss.backward()  # runs it again
            first, rest = out.detach().view(-1).split(8 + number % 2)[:2]
            turned = out.detach().t()[number % 3 :]
            training.notes.append(first.max().tolist())
            first.mul_(2.0)
            rest[0] = 3.0
            turned[0, 1] = 7.0
            training.opt.step()
            training.opt.zero_grad()
            training.notes.append((out.tolist(), first.clone(), rest.clone(), turned.clone()))
            return out.detach()

        return step

    compiled = Compiled()
    train_both(make, compiled=compiled, calls=9)
    assert compiled.launches >= 9


VIEWS_OF_GRADIENTS = {
    "a row": lambda weight: weight.grad[0],
    "turned, a column": lambda weight: weight.grad.t()[:, 0],
    "detached": lambda weight: weight.grad.detach(),
    "one of several": lambda weight: weight.grad.unbind(0)[1],
}


@pytest.mark.parametrize("view_of", VIEWS_OF_GRADIENTS.values(), ids=VIEWS_OF_GRADIENTS)
def test_a_view_of_what_nobody_holds_is_on_its_memory_behind_a_read(view_of: Any) -> None:
    """Nobody holds ``weight.grad``, whose memory stays where gradients of several calls are added."""

    def make(training: Training) -> Step:
        calls, weight = iter(range(100)), training.model.first.weight

        def step(x: Tensor) -> None:
            loss = training.model(x).square().mean()
            loss.backward()
            view = view_of(weight)
            view.mul_(0.5 + loss.tolist() % 1.0)
            if next(calls) % 2 == 0:
                training.opt.step()
                training.opt.zero_grad()

        return step

    train_by_stages(make, calls=9)
