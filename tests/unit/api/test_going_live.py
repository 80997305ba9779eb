"""A step that is refused as one graph goes live, unless it was compiled with fullgraph=True."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import wholestep as ws
from tests.unit.api.test_compiled_step import batch, make
from tests.unit.capture.steps import differing, train, twins


@pytest.fixture
def may_go_live() -> bool:
    """Whether steps that a test compiles may go live."""
    return True


def branching(model: Any, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = train(model, opt, x)
    return loss * 2 if loss > 0 else loss


def both(step: Callable[..., Any], calls: list[Tensor], **options: Any) -> ws.CompiledStep:
    """Runs the step eagerly and compiled, which is equal in every bit. Gives the compiled one."""
    eager, ours = twins(make)
    compiled = ws.compile(step, backend="eager", **options)
    for number, x in enumerate(calls):
        torch.manual_seed(number)
        wanted = step(*eager, x)
        torch.manual_seed(number)
        assert torch.equal(compiled(*ours, x), wanted)
        assert differing(eager[0], ours[0]) == []
    return compiled


def test_more_signatures_than_retraces_go_live() -> None:
    step = both(train, [batch(rows) for rows in (1, 2, 3, 4, 1, 3, 4, 4)], max_retraces=1, dynamic=False)
    explanation = step.explain()
    assert "max_retraces=1" in str(explanation)
    with pytest.raises(ws.ArtifactError, match="is live and cannot be saved"):
        step.save(Path("nowhere"))


def test_a_refused_step_goes_live_and_says_why() -> None:
    step = both(branching, [batch() for _ in range(6)])
    assert "the value of a tensor decides what Python does here" in str(step.explain())
    assert len(step.program().graph.nodes) > 0
    with pytest.raises(ws.CaptureError, match="the value of a tensor decides"):
        both(branching, [batch()], fullgraph=True)


def test_an_error_of_the_first_live_call_is_that_of_eager_code() -> None:
    def step(x: Tensor, wrong: bool) -> Tensor:
        if wrong:
            raise ValueError("my own complaint")
        return x * 2 if x.sum() > 0 else x

    compiled = ws.compile(step, backend="eager")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^my own complaint$"):
            compiled(batch(), True)
        assert torch.equal(compiled(batch(), False), batch() * 2)
    with pytest.raises(TypeError, match="positional argument"):
        ws.compile(step, backend="eager")(batch(), True, 1)
