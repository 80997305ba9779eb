"""`explain` of a live step says why its calls run one by one, and at which line of the user's that began."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.unit.live.both import Compiled, Step, Training, batch, train_both
from wholestep.api.report.live_explanation import explain_live
from wholestep.live.live_step import MAX_REASONS, LiveStep

CALLS = 8


def a_graph_from_before(training: Training) -> Step:
    held: list[Tensor] = []

    def step(x: Tensor) -> None:
        if held:
            training.update(held.pop() + training.model(x).mean())  # HERE
        held.append(training.model(x).mean())

    return step


def a_new_call_at_every_call(training: Training) -> Step:
    numbers = iter(range(100))

    def step(x: Tensor) -> None:
        out = training.model(x)
        training.update(out.roll(next(numbers)).mean())  # HERE

    return step


def another_function_each_time(training: Training) -> Step:
    functions = iter([torch.relu, torch.tanh, torch.sin, torch.cos, torch.exp, torch.abs, torch.square, torch.erf] * 2)

    def step(x: Tensor) -> None:
        out = training.model(x)
        training.update(next(functions)(out).mean())  # HERE

    return step


def fewer_calls_at_first(training: Training) -> Step:
    counts = iter(range(100))

    def step(x: Tensor) -> None:
        training.update(training.model(x).mean())
        for _ in range(next(counts)):
            training.notes.append(training.model.last.weight.detach() + 1.0)  # HERE

    return step


def a_value_in_the_graph_without_a_backward(training: Training) -> Step:
    def step(x: Tensor) -> Tensor:
        loss = training.model(x).mean()
        training.notes.append(loss.item())  # HERE
        return loss

    return step


KINDS: dict[str, tuple[Callable[[Training], Step], str]] = {
    "graph": (a_graph_from_before, "add is given a tensor whose graph began before the step"),
    "number": (a_new_call_at_every_call, "argument 2 of roll was"),
    "function": (another_function_each_time, "tanh is called where relu was (test_why_eager.py:"),
    "longer": (fewer_calls_at_first, "is called where the known calls end"),
    "no backward": (
        a_value_in_the_graph_without_a_backward,
        "item asks for a value, where the graph is still needed, and no backward can run ahead",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_flush_has_a_reason_and_a_line(kind: str) -> None:
    make, reason = KINDS[kind]
    live = train_both(make, calls=CALLS, compiled=Compiled())
    source, first = inspect.getsourcelines(make)
    here = first + next(number for number, line in enumerate(source) if line.endswith("# HERE\n"))
    reasons = explain_live(live, "eager").live.eager_reasons
    assert any(reason in one and one.endswith(f"(test_why_eager.py:{here})") for one in reasons), reasons
    assert reason in " ".join(str(explain_live(live, "eager")).split())


def test_a_step_that_follows_has_none() -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor) -> None:
            training.notes.append(training.update(training.model(x).mean()).item())

        return step

    live = train_both(make, compiled=Compiled())
    assert explain_live(live, "eager").live.eager_reasons == ()


def test_reasons_that_name_values_do_not_pile_up() -> None:
    training, factors = Training(), iter(range(1, 1000))

    def step(x: Tensor) -> None:
        for _ in range(2):  # the first is a piece, so that the step goes on to be recorded
            out = training.model(x).mean()
            training.notes.append(training.update(out).item())
        training.update((training.model(x) * complex(next(factors))).real.mean())

    live = LiveStep(step, "step", "", Compiled())
    for call in range(2 * MAX_REASONS):
        live(batch(call), {})
    assert len(live.stats.reasons) == MAX_REASONS
    assert live.is_recorded
