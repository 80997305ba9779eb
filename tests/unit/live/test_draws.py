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


@torch.library.custom_op("wholestep_tests::noise_of", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def noise_of(x: Tensor, scale: float) -> Tensor:
    """Draws where there is a scale."""
    return x + (torch.randn_like(x) * scale if scale else 1.0)


@noise_of.register_fake
def _(x: Tensor, scale: float) -> Tensor:
    return torch.empty_like(x)


def test_a_call_that_drew_nothing_at_first_may_draw_later() -> None:
    def make(training: Training) -> Step:
        scales = deque([0.0, 0.0, 0.5, 0.25, 0.0, 0.5])

        def step(x: Tensor) -> Tensor:
            noise = noise_of(training.model.first.weight.detach(), scales.popleft())
            torch.manual_seed(7)  # which is for what comes after it
            return training.update(training.model(x).mean() * noise.sum())

        return step

    live = train_both(make, calls=6)
    assert live.stats.launches == 7


def test_a_call_on_an_empty_batch_may_draw_on_another_one() -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor) -> Tensor:
            out = training.model.first(x)
            noisy = out + torch.rand_like(out)
            torch.manual_seed(7)
            return training.update(noisy.sum())

        return step

    live = train_both(make, lambda call: (torch.ones((0, 2, 3, 5)[call % 4], 4),), calls=8)
    assert live.stats.launches > 4
