"""Functions of torch that a live step records whole, whoever holds them."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_ as clipped_early

from tests.unit.live.both import Compiled, Step, Training, train_both
from wholestep.live.opaque.redirect import Redirections, redirection


def with_cells(count: int) -> types.FunctionType:
    a = b = 1
    functions: list[Any] = [lambda x, *, y=2: x + y, lambda x, *, y=2: x + y + a, lambda x, *, y=2: x + y + a + b]
    found: types.FunctionType = functions[count]
    return found


@pytest.mark.parametrize("count", range(3))
def test_a_function_with_cells_calls_the_target_and_can_be_looked_into(count: int) -> None:
    function = with_cells(count)
    seen: list[Any] = []

    def target(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(sorted(sys._getframe(1).f_locals))
            return plain(*args, **kwargs) * 10

        return call

    one = redirection(function, target)
    function.__code__ = one.redirected
    assert (function(1), function(1, y=5)) == ((3 + count) * 10, (6 + count) * 10)
    function.__code__ = one.original
    assert function(1) == 3 + count
    assert len(seen) == 2


def test_redirections_end_with_the_last_live_step() -> None:
    function = with_cells(1)
    wanted = [(function, lambda plain: lambda *args: "redirected")]
    redirected = Redirections()
    with redirected(wanted):
        with redirected(wanted):
            assert function(1) == "redirected"
        assert function(1) == "redirected"
    assert function(1) == 4


def test_a_name_imported_early_and_a_wrapped_step_are_one_record_each() -> None:
    def make(training: Training) -> Step:
        scheduler = torch.optim.lr_scheduler.ConstantLR(training.opt)  # wraps ``opt.step`` in a function of its own

        def step(x: Any) -> Any:
            loss = training.model(x).mean()
            loss.backward()
            clipped_early(training.model.parameters(), 1.0)
            training.opt.step()
            training.opt.zero_grad()
            scheduler.step()
            return loss

        return step

    live = train_both(make, compiled=Compiled())
    functions = [record.key.function.__name__ for record in live.pieces[0].path.records]
    assert functions[-3:] == ["clip_grad_norm_", "step", "clear_grads"]
