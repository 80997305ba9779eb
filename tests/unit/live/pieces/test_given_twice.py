"""A call that gives one tensor in two places, as an encoder its last state and all states, gives one object again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from tests.unit.live.both import CALLS, Compiled, Step, Training, train_both, train_by_stages

GIVES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "last and all": lambda h, y: (y, [h, y]), "twice": lambda h, y: (y, y),
    "three times": lambda h, y: (y, (y, h), y), "a dict": lambda h, y: {"last": y, "hidden": (h, y)},
}  # fmt: skip


class Encoder(nn.Module):
    """Two layers of a training's model, which gives states in some form."""

    def __init__(self, training: Training, give: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.norm, self.give = training.model.first, training.model.norm, give

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x)
        return self.give(hidden, self.norm(hidden).relu())


def states(given: Any) -> list[Tensor]:
    if isinstance(given, Tensor):
        return [given]
    return [one for item in (given.values() if isinstance(given, dict) else given) for one in states(item)]


@pytest.mark.parametrize("read", ["", "before", "between"])
@pytest.mark.parametrize("uses", ["first", "second", "all"])
@pytest.mark.parametrize("give", GIVES.values(), ids=GIVES)
def test_it_is_one_object_in_both_places(give: Callable[[Tensor, Tensor], Any], uses: str, read: str) -> None:
    def make(training: Training) -> Step:
        encoder = Encoder(training, give)

        def step(x: Tensor) -> Tensor:
            if read == "before":
                training.notes.append(training.model.first(x).sum().item())
            found = states(encoder(x))
            last = [one for one in found if one is found[0]]
            training.notes.append((len(found), len(last)))
            if read == "between":
                training.notes.append(found[-1].sum().item())
            used = {"first": last[:1], "second": last[1:2], "all": last}[uses]
            loss = sum((training.model.last(one).mean() for one in used), used[0].sum() * 0.1)
            training.notes.append(training.update(loss).item())
            return found[-1].detach()

        return step

    compiled = Compiled()
    train_both(make, compiled=compiled)
    assert compiled.launches >= CALLS - 1
    train_by_stages(make)


def test_it_stays_one_where_calls_run_one_by_one() -> None:
    def make(training: Training) -> Step:
        encoder, calls = Encoder(training, GIVES["last and all"]), []

        def step(x: Tensor) -> Tensor:
            calls.append(0)
            last, (_, same) = encoder(x)
            training.notes.append(last is same)
            if len(calls) > 3:  # a call that was not met before
                last = last * len(calls)
            loss = training.model.last(last).mean() + same.sum() * 0.1
            return training.update(loss).detach()

        return step

    train_both(make)
