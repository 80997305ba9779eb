"""A step that was captured before starts warm: nothing is traced, and the bits are the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import wholestep as ws
import wholestep.api.compiled_step
from tests.behaviour.warm import steps
from tests.behaviour.warm.steps import counting, losses, run, state_of, things, train
from wholestep.capture.tracing.tracer import Tracer


def test_a_loaded_step_gives_the_same_bits_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    eager, captured, first = things(), things(), ws.compile(train)
    cold = losses(first, captured)
    torch.manual_seed(0)
    things()  # draws what was drawn before the steps
    assert losses(train, eager) == cold
    monkeypatch.setattr(Tracer, "run", lambda *_: pytest.fail("it was traced"))
    loaded, second = things(), ws.compile(train)
    assert losses(second, loaded) == cold
    for context in (captured, loaded):
        assert len(state_of(context)) == len(state_of(eager))
        assert all(map(torch.equal, state_of(context), state_of(eager)))
    info = second.cache_info()
    assert (info.traces, info.loaded, info.hits) == (0, 1, 2)
    assert "loaded from" in str(second.explain())
    assert second.explain().loaded_from
    assert not first.explain().loaded_from


def test_a_resumed_training_finds_the_saved_step() -> None:
    """A resumed training finds the step that a fresh one has saved."""
    context = things()
    losses(ws.compile(train), context)
    plain, warm = things(), things()
    for one in (plain, warm):
        one[0].load_state_dict(context[0].state_dict())
        one[1].load_state_dict(copy.deepcopy(context[1].state_dict()))
    torch.manual_seed(1)
    expected = losses(train, plain)
    torch.manual_seed(1)
    step = ws.compile(train)
    assert losses(step, warm) == expected
    assert step.cache_info().loaded == 1
    assert all(map(torch.equal, state_of(plain), state_of(warm)))


class Averaging:
    """Keeps an average, and a sum in the same tensor at first."""

    def __init__(self) -> None:
        self.model, self.opt, self.x, self.y = things()
        self.mean = self.total = torch.zeros(())

    def step(self) -> Tensor:
        loss = train(self.model, self.opt, self.x, self.y)
        self.mean, self.total = 0.9 * self.mean + 0.1 * loss, self.total + loss
        return loss


def runs(
    make: Callable[[], Averaging], play: Callable[[Any, Callable[[], Tensor]], list[Tensor]]
) -> list[list[Tensor]]:
    """What ``play(trainer, step)`` gives in eager code, of a captured step, and of a loaded one."""
    found, infos = [], []
    for wrap in (lambda fn: fn, ws.compile, ws.compile):
        trainer = make()
        step = wrap(trainer.step)
        torch.manual_seed(1)
        found.append(play(trainer, step))
        infos += [step.cache_info()] if isinstance(step, ws.CompiledStep) else []
    assert [(info.traces, info.loaded) for info in infos] == [(2, 0), (0, 2)]
    return found


def test_tensors_that_are_replaced_are_new_ones_in_a_loaded_step_too() -> None:
    def play(trainer: Averaging, step: Callable[[], Tensor]) -> list[Tensor]:
        kept = []
        for _ in range(4):
            step()
            kept += [trainer.mean, trainer.total]
        return kept

    eager, cold, warm = runs(Averaging, play)
    assert all(map(torch.equal, eager, cold))
    assert all(map(torch.equal, eager, warm))


class WithBatch(Averaging):
    """Is given its batch in an attribute."""

    def step(self) -> Tensor:
        return train(self.model, self.opt, self.x, self.y)


def test_a_step_with_replaced_tensors_finds_both_of_its_traces() -> None:
    def play(trainer: WithBatch, step: Callable[[], Tensor]) -> list[Tensor]:
        found = []
        for call in range(12):
            trainer.x = torch.full((6, 4), 0.1 * call)
            found.append(step())
        return found

    eager, cold, warm = runs(WithBatch, play)
    assert eager == cold == warm


def test_a_global_named_like_a_method_does_not_keep_a_step_from_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """``step``, as many a compiled step is called: the code of ``opt.step()`` names it."""
    for loaded in (0, 1):
        step = ws.compile(train)
        monkeypatch.setattr(steps, "step", step, raising=False)
        step(*things())
        assert step.cache_info().loaded == loaded


def test_a_loaded_step_is_captured_again_where_its_guards_fail() -> None:
    run()
    context, step = things(), ws.compile(train)
    step(*context)
    context[0].eval()
    step(*context)
    assert step.cache_info().loaded == 1
    assert step.cache_info().traces == 1
    assert "training" in step.cache_info().reasons[0]


def test_a_step_that_moves_numbers_starts_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of its programs: the one that makes the state, and the one that goes on from there."""

    def counts(opt: Any) -> Any:
        return opt.calls, opt.param_groups[0]["k"], [one["seen"] for one in opt.state.values()]

    def tensors(context: Any) -> list[Tensor]:
        return [*context[0].parameters(), *(one["mean"] for one in context[1].state.values())]

    wanted, came = counting(), counting()
    first, second = ws.compile(train), ws.compile(train)
    cold = losses(first, wanted)
    assert first.cache_info().traces == 2
    monkeypatch.setattr(Tracer, "run", lambda *_: pytest.fail("it was traced"))
    torch.manual_seed(0)
    things()  # draws what was drawn before the steps
    assert losses(second, came) == cold
    assert (second.cache_info().traces, second.cache_info().loaded) == (0, 2)
    assert counts(wanted[1]) == counts(came[1]) == (3, 3, [6] * 4)
    assert all(map(torch.equal, tensors(wanted), tensors(came)))
