"""A branch that does nothing but raise is checked by the graph, and raises what the user's code raises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.harness.training import backward_and_step
from tests.unit.capture.scalars import raising_functions
from tests.unit.capture.steps import calls, program_of
from wholestep.errors import CaptureError
from wholestep.ir.ops.assertions import CHECK

GOOD = torch.tensor([0.5, 1.0, 2.0, 1.5])
BAD = torch.tensor([0.5, 1.0, 4.0, 1.5])


COMPILED = (
    raising_functions.asserts,
    raising_functions.asserts_a_number,
    raising_functions.raises,
    raising_functions.asks_python,
    raising_functions.clips,
)


@pytest.mark.parametrize(("fn", "backend"), [
    *((fn, "eager") for fn in raising_functions.RAISE), *((fn, "inductor") for fn in COMPILED),
], ids=lambda one: getattr(one, "__name__", one))  # fmt: skip
def test_it_raises_what_the_code_raises(fn: Any, backend: str) -> None:
    kind, text = raising_functions.RAISE[fn]
    run: Any = ws.compile(fn, backend=backend, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(run(GOOD), fn(GOOD))
        with pytest.raises(kind):
            fn(BAD)
        with pytest.raises(kind) as raised:
            run(BAD)
        assert text is None or str(raised.value) == text
        assert "raising_functions.py:" in "".join(getattr(raised.value, "__notes__", ())) or fn in (
            raising_functions.distribution,
            raising_functions.clips,
        )
    assert run.cache_info().traces == 1


@pytest.mark.parametrize("fn", raising_functions.RAISE, ids=lambda fn: fn.__name__)
def test_without_fullgraph_the_error_is_that_of_the_code(fn: Any) -> None:
    """The step's own Python runs once more, and the next call is on the graph again."""
    kind, _ = raising_functions.RAISE[fn]
    run: Any = ws.compile(fn, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(run(GOOD), fn(GOOD))
        with pytest.raises(kind) as wanted:
            fn(BAD)
        with pytest.raises(kind) as raised:
            run(BAD)
        assert (type(raised.value), str(raised.value)) == (type(wanted.value), str(wanted.value))
        assert raised.traceback[-1].lineno == wanted.traceback[-1].lineno
    assert run.cache_info().traces == 1


def test_answers_of_python_are_no_results() -> None:
    """They are bools in eager code, and would be tensors."""
    with pytest.raises(CaptureError, match=r"Return the number, and ask outside"):
        ws.compile(raising_functions.answers, backend="eager", fullgraph=True)(GOOD)


def test_the_first_call_is_checked_too() -> None:
    run: Any = ws.compile(raising_functions.raises, backend="eager")
    with pytest.raises(ValueError, match="not below 3"):
        run(BAD)
    assert torch.equal(run(GOOD), GOOD * 2)


@pytest.mark.parametrize("fn", raising_functions.REFUSED, ids=lambda fn: fn.__name__)
def test_what_may_do_more_is_refused(fn: Any) -> None:
    run: Any = ws.compile(fn, backend="eager", fullgraph=True)
    with pytest.raises(CaptureError, match=f"raising_functions.py:.* in {fn.__name__}(.|\n)*value of a tensor decides"):
        run(GOOD)


@pytest.mark.parametrize(
    "fn", [raising_functions.calls_what_raises, raising_functions.suppresses], ids=lambda fn: fn.__name__
)
def test_what_is_raised_in_a_function_that_the_step_catches_is_refused(fn: Any) -> None:
    with pytest.raises(CaptureError, match=r"in raises(.|\n)*value of a tensor decides"):
        ws.compile(fn, backend="eager", fullgraph=True)(GOOD)


def test_who_calls_the_step_may_catch_it() -> None:
    run: Any = ws.compile(raising_functions.raises, backend="eager")
    try:
        run(BAD)
    except ValueError as error:
        caught = str(error)
    assert caught == "not below 3"


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("asked", ["the batch", "the updated weight"])
def test_nothing_is_half_updated(asked: str, backend: str) -> None:
    """The check stands after the update in the code: in eager code it is too late for the parameters."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        backward_and_step(loss, opt)
        if asked == "the batch":
            return raising_functions.raises(x)[0] + loss.detach()
        return raising_functions.raises(model.weight).detach()[0, 0] + loss.detach()

    def state() -> list[Tensor]:
        return [*model.parameters(), *(opt.state[one]["momentum_buffer"] for one in model.parameters())]

    run: Any = ws.compile(step, backend=backend, fullgraph=True)
    run(GOOD)
    before = [one.detach().clone() for one in state()]
    with pytest.raises(ValueError, match="not below"):
        run(BAD if asked == "the batch" else -GOOD * 1e6)
    assert all(torch.equal(old, new) for old, new in zip(before, state(), strict=True))


def test_a_check_is_a_node_and_nothing_else_is_asked_for() -> None:
    program = program_of(raising_functions.asserts_both, GOOD)
    assert [node.args[1:3] for node in calls(program) if node.target is CHECK] == [
        (True, "builtins:AssertionError")
    ] * 2


def test_a_check_survives_a_file(tmp_path: Any) -> None:
    run: Any = ws.compile(raising_functions.raises, backend="eager")
    run(GOOD)
    run.save(tmp_path / "step")
    loaded: Any = ws.load(tmp_path / "step", raising_functions.raises, trusted=True)
    assert torch.equal(loaded(GOOD), GOOD * 2)
    with pytest.raises(ValueError, match="not below 3"):
        loaded(BAD)
