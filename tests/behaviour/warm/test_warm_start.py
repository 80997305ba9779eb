"""A step that was captured before starts warm: nothing is traced, and the bits are the same."""

from __future__ import annotations

import copy

import pytest
import torch

import wholestep as ws
import wholestep.api.compiled_step
from tests.behaviour.warm import steps
from tests.behaviour.warm.steps import losses, run, state_of, things, train
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
