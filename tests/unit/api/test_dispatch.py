"""Calls that go by turns to many traces: each finds its own by a key, and the guards of that trace decide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import wholestep as ws
from wholestep.api.dispatch import MAX_KEYS, call_key

SIZES = range(2, 18)


def made(**options: Any) -> tuple[ws.CompiledStep, nn.Module]:
    model = nn.Linear(4, 1)

    @ws.compile(backend="eager", max_retraces=100, **options)
    def step(x: Tensor, scale: float = 1.0) -> Tensor:
        loss = (model(x) * scale).sum()
        loss.backward()
        model.zero_grad()
        return loss.detach()

    return step, model


def compared(step: ws.CompiledStep, call: Callable[[], Any]) -> int:
    """How many calls of the step in `call` were compared with traces in full."""
    before = step._stats.dispatched_calls
    call()
    return step._stats.dispatched_calls - before


def test_calls_by_turns_are_not_compared_in_full() -> None:
    step, model = made(dynamic=False)
    batches = [torch.randn(size, 4) for size in SIZES]
    for _ in range(2):
        for x in batches:
            step(x)
    assert step.cache_info().traces == len(SIZES)
    assert compared(step, lambda: [step(x) for x in batches * 3]) == 0
    for x in batches:
        torch.testing.assert_close(step(x), model(x).sum().detach())
    assert step.cache_info().traces == len(SIZES)


def test_the_guards_of_a_trace_decide_and_not_the_key() -> None:
    step, model = made(dynamic=False)
    x = torch.randn(4, 4)
    calls: list[tuple[Any, ...]] = [(x, 1.0), (x, 2.0), (x.t(), 1.0), (x.double().float().t().t(), 2.0)]
    assert len({call_key((call, {})) for call in calls}) == 1
    for _ in range(3):
        for args in calls:
            torch.testing.assert_close(step(*args), (model(args[0]) * args[1]).sum().detach())


def test_calls_that_are_measured_are_measured_by_turns_with_others() -> None:
    step, _ = made(dynamic=False)
    batches = [torch.randn(size, 4) for size in (2, 3)]
    for x in batches * 3:
        step(x)
    step.measure(2)
    assert compared(step, lambda: [step(x) for x in batches * 3]) == 3  # a first one, and two that are timed
    assert step.explain().measured is not None


def test_keys_do_not_pile_up() -> None:
    step, _ = made(dynamic=False)
    step(torch.randn(8, 4))
    for number in range(MAX_KEYS):
        step._dispatcher._by_key[number] = step._dispatcher.entries[0]
    step(torch.randn(9, 4))
    assert len(step._dispatcher._by_key) == 1


def test_arguments_that_only_differ_inside_of_containers_have_keys_of_their_own() -> None:
    x, y = torch.ones(2, 3), torch.ones(3, 2)
    trees: list[Any] = [x, y, [x], (x,), {"a": x}, {"b": x}, {"a": y}, (x, True), (x, 1), (x, None), (x, "text")]
    assert len({call_key(tree) for tree in trees}) == len(trees)
    assert call_key((x, "one", 0.5)) == call_key((x + 1, "another", 1.5))
