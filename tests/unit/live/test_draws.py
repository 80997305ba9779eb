"""Random numbers that recorded calls draw, and which calls draw any."""

from __future__ import annotations

from collections import deque

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.unit.live.both import Compiled, Step, Training, train_both


def test_draws_come_in_their_order() -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor) -> Tensor:
            out = training.model(x)  # draws for dropout
            return training.update((out + torch.rand(3, 1) + torch.randn_like(out)).mean())

        return step

    compiled = Compiled()
    train_both(make, compiled=compiled, calls=8)
    assert compiled.launches > 0


def test_what_drops_nothing_draws_nothing() -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor) -> Tensor:
            out = F.dropout(training.model(x), 0.0)
            out = F.scaled_dot_product_attention(out[None], out[None], out[None])
            return training.update((out + torch.rand(())).mean())

        return step

    live = train_both(make)
    drawn = {record.key.function.__name__: record.drawn for record in live.pieces[0].path.records}
    assert drawn["scaled_dot_product_attention"] == drawn["dropout"] == ()
    assert drawn["rand"] == (torch.default_generator,)


def test_a_call_that_drew_nothing_at_first_may_draw_later() -> None:
    """Of an empty batch, and with a probability that is zero in the first calls."""

    def make(training: Training) -> Step:
        chances = deque([0.0, 0.0, 0.5, 0.25, 0.0, 0.5])

        def step(x: Tensor) -> Tensor:
            dropped = F.dropout(x.exp(), chances.popleft())
            return training.update(training.model(dropped).sum() + torch.rand(()))

        return step

    def rows(call: int) -> tuple[Tensor, ...]:
        return (torch.ones(0 if call < 2 else 3, 4),)

    train_both(make, calls=6)
    train_both(make, rows, calls=6)
