"""A live step whose tensors have other sizes in every call: two calls show which, and one path serves for all."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.live.both import Compiled, Step, Training, batch, train_both
from tests.unit.live.test_following import appends_the_loss
from wholestep.live.live_step import LiveStep

CALLS = 12


def rows(call: int) -> tuple[Tensor, ...]:
    """A batch of another size in each call, which is never 0 or 1."""
    count = random.Random(call).randint(2, 40)
    return (torch.randn(count, 4, generator=torch.Generator().manual_seed(call)),)


def trained(make: Callable[[Training], Step], arguments: Callable[[int], tuple[Any, ...]] = rows) -> LiveStep:
    """Compares with eager code. Says how many pieces were compiled, for how many calls."""
    return train_both(make, arguments, compiled=Compiled(), calls=CALLS)


def computes_with_sizes(training: Training) -> Step:
    def step(x: Tensor) -> Tensor:
        count = x.shape[0]
        h = torch.cat([training.model(x), x.mean(1, keepdim=True)], 1).view(2 * count, 1)
        places = torch.arange(h.shape[0])
        loss = (h[: count + 1].sum() + h[-count:].mean() + (h * places[:, None]).mean()) / count
        training.update(loss)
        training.notes.append(loss.item())
        return loss

    return step


def branches(training: Training) -> Step:
    def step(x: Tensor) -> Tensor:
        loss = training.model(x).square().mean()
        if loss > 0.1:
            loss = loss.sqrt()
        return training.update(loss)

    return step


def asks_for_a_size(training: Training) -> Step:
    def step(x: Tensor) -> Tensor:
        count = int((x[:, 0] > 0).sum()) + 2
        chosen = x.repeat(2, 1)[:count]
        return training.update(training.model(chosen).square().mean())

    return step


def indexes_with_a_mask(training: Training) -> Step:
    def step(x: Tensor) -> Tensor:
        keep = x[:, 0] > -0.7
        loss = training.model(x)[keep].square().mean()
        training.update(loss)
        training.notes.append(loss.item())
        return loss

    return step


def shifts_by_a_negative_number(training: Training) -> Step:
    def step(x: Tensor) -> Tensor:
        loss = (training.model(x) * x.roll(-int(x.shape[0] // 2), 0)[:, :1]).mean()
        training.update(loss)
        training.notes.append(loss.item())
        return loss

    return step


@pytest.mark.parametrize(
    ("make", "pieces"),
    [
        (appends_the_loss, 1),
        (computes_with_sizes, 1),
        (asks_for_a_size, 1),
        (indexes_with_a_mask, 1),
        (shifts_by_a_negative_number, 1),
    ],
)
def test_one_path_serves_for_all_sizes(make: Callable[[Training], Step], pieces: int) -> None:
    live = trained(make)
    assert len(live.pieces) == pieces
    assert all(piece.launches == CALLS - 2 for piece in live.pieces), live.stats


def test_branches_are_paths_for_all_sizes() -> None:
    live = trained(branches)
    assert len({piece.path for piece in live.pieces}) <= 2
    assert sum(piece.launches for piece in live.pieces) >= CALLS - 4


def test_ways_are_learned_one_after_another() -> None:
    """Each is gone twice before its sizes are known to move, and nine calls in a row have no piece."""

    def make(training: Training) -> Step:
        def step(x: Tensor, way: int) -> Tensor:
            out = training.model(x)
            for _ in range(way):
                out = out.sin()
            loss = training.update(out.square().mean())
            training.notes.append(loss.item())
            return loss

        return step

    ways, calls = 5, 30
    live = train_both(make, lambda call: (*rows(call), call % ways), compiled=Compiled(), calls=calls)
    assert live.is_recorded
    assert len({piece.path for piece in live.pieces}) == ways
    assert sum(piece.launches for piece in live.pieces) >= calls - 2 * ways


def test_a_float_that_decides_a_shape_decides_it_at_every_call() -> None:
    """Two calls whose floats give the same shape do not show that the third will."""

    def make(training: Training) -> Step:
        ends = iter([4.2, 4.7, 4.4, 7.1, 9.9, 3.3] * 2)

        def step(x: Tensor) -> Tensor:
            places = torch.arange(0.0, next(ends)) + training.model(x).mean() * 0
            training.notes.append(places.shape[0])
            return training.update((training.model(x).mean() * places).sum() * places.shape[0])

        return step

    assert trained(make, batch).stats.launches >= CALLS - 3


def test_an_int_that_did_nothing_twice_may_decide_a_shape_the_third_time() -> None:
    def make(training: Training) -> Step:
        dims = iter([1, -1, 1, 0, 1, 0] * 2)

        def step(x: Tensor) -> Tensor:
            out = training.model(x).flatten(next(dims))
            training.notes.append(out.dim())
            return training.update(out.square().mean() * out.dim())

        return step

    trained(make, batch)


def test_a_call_that_gives_another_number_of_tensors_is_another_path() -> None:
    """As many parts as the size of the call has fives: two in the first calls, then three."""
    sizes = [7, 9, 8, 6, 13, 7, 12, 4, 9, 10, 11, 2]

    def sized(call: int) -> tuple[Tensor, ...]:
        return (torch.randn(sizes[call], 4, generator=torch.Generator().manual_seed(call)),)

    def make(training: Training) -> Step:
        def step(x: Tensor) -> Tensor:
            parts = training.model(x).split(5)
            training.notes.append(len(parts))
            losses = [(place + 1) * part.square().mean() for place, part in enumerate(parts)]
            return training.update(torch.stack(losses).sum())

        return step

    trained(make, sized)
