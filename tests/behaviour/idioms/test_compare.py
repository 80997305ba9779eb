"""What compares the idioms sees each kind of difference, and the table says what it found."""

from __future__ import annotations

import io
import json
import logging
import random
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import wholestep as ws
from benchmarks import idiom_table
from benchmarks.idiom_table import row, table
from benchmarks.idioms import CALLS, IDIOMS, Idiom, Loop, compare
from benchmarks.idioms.base import loop, small_training, update
from benchmarks.idioms.compare import LINES, Outcome, first_sentence, outcome, same

Step = Callable[..., Any]


def build() -> Loop:
    """A step with one effect of every kind."""
    model, opt = small_training()
    losses: list[float] = []

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = update(F.cross_entropy(model(x), y), opt)
        losses.append(loss.item() + random.random() + np.random.rand() + torch.rand(()).item())
        print("loss", loss.item())
        logging.getLogger("training").warning("loss %s", loss.item())
        return loss

    return loop(step, model=model, opt=opt, losses=losses)


IDIOM = Idiom(name="it", group="none", build=build)


def judged(monkeypatch: pytest.MonkeyPatch, wrapper: Callable[[Step], Step], backend: str = "eager") -> Outcome:
    """The outcome where this is what `ws.compile` makes of the step."""
    monkeypatch.setattr(compare.ws, "compile", lambda step, **options: wrapper(step))
    monkeypatch.setattr(compare, "front", lambda step: ("pure", 1, ""))
    return outcome(IDIOM, backend)


def silent(step: Step) -> Step:
    def called(*args: Tensor) -> Any:
        with redirect_stdout(io.StringIO()):
            return step(*args)

    return called


def without_logs(step: Step) -> Step:
    def called(*args: Tensor) -> Any:
        logging.disable(logging.CRITICAL)
        try:
            return step(*args)
        finally:
            logging.disable(logging.NOTSET)

    return called


def drawing(draw: Callable[[], object]) -> Callable[[Step], Step]:
    def wrapper(step: Step) -> Step:
        return lambda *args: (step(*args), draw())[0]

    return wrapper


def rounded_otherwise(step: Step) -> Step:
    return lambda *args: step(*args) * (1 + 2**-22)


def writing_its_batch(step: Step) -> Step:
    return lambda x, y: (step(x, y), x.mul_(2))[0]


def returning_another_type(step: Step) -> Step:
    return lambda *args: torch.nn.Parameter(step(*args))


def failing(step: Step) -> Step:
    def called(*args: Tensor) -> Any:
        raise RuntimeError("out of order")

    return called


def refusing(step: Step) -> Step:
    def called(*args: Tensor) -> Any:
        raise ws.CaptureError("The step could not be captured at net.py:3\n    x.item()\nno values here. Return it.")

    return called


def twice(step: Step) -> Step:
    return lambda *args: (step(*args), step(*args))[1]


@pytest.mark.parametrize(
    ("wrapper", "told"),
    [
        (silent, "printed"),
        (without_logs, "logged"),
        (drawing(random.random), "random state of python"),
        (drawing(np.random.rand), "random state of numpy"),
        (drawing(lambda: torch.rand(())), "random state of torch"),
        (rounded_otherwise, "returned: 1 of 1 elements differ"),
        (writing_its_batch, "arguments[0]"),
        (returning_another_type, "returned:type"),
        (failing, "raised RuntimeError: out of order, and eager code did not"),
        (twice, "model.0.weight"),
    ],
)
def test_what_differs_is_told(monkeypatch: pytest.MonkeyPatch, wrapper: Callable[[Step], Step], told: str) -> None:
    found = judged(monkeypatch, wrapper)
    assert found.kind == "wrong"
    assert any(told in one for one in found.complaints), found.complaints


def test_what_is_equal_holds_and_a_refusal_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(monkeypatch, lambda step: step) == Outcome("it", "pure", 1, "")
    assert judged(monkeypatch, refusing).reason == "CaptureError: no values here"


def test_only_another_backend_may_round(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not judged(monkeypatch, rounded_otherwise).holds
    assert judged(monkeypatch, rounded_otherwise, "inductor").holds
    assert same("loss 1.00000", "loss 1.00001", rounds=True)
    assert not same("loss 1.00000", "loss 1.10000", rounds=True)
    assert not same("loss 1.00000", "lass 1.00000", rounds=True)


def test_a_warning_of_the_users_line_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def warning(step: Step) -> Step:
        def called(*args: Tensor) -> Any:
            path = str(Path(compare.__file__).parent / "groups" / "containers.py")
            warnings.warn_explicit("careful", UserWarning, path, 1)
            return step(*args)

        return called

    assert "warned" in judged(monkeypatch, warning).complaints[0]


def test_random_states_are_as_they_were() -> None:
    before = repr(compare.random_states())
    compare.play(IDIOM, lambda step: step)
    assert repr(compare.random_states()) == before


def test_a_tensor_of_another_class_is_told() -> None:
    class Handle(Tensor):
        pass

    wanted, came = ([dict(compare.leaves(one, "x"))] for one in (torch.ones(2), torch.ones(2).as_subclass(Handle)))
    assert any("x is a <class" in one and "Handle" in one for one in compare.differences(wanted, came))


def test_the_reason_of_an_error_is_one_sentence_without_folders() -> None:
    error = ws.CaptureError("The step changes state at /a/b/net.py:3 in step: it grew. Do it outside.\nThe step is f.")
    assert first_sentence(error) == "The step changes state at net.py:3 in step: it grew"


def test_the_reason_of_a_live_step_names_no_line() -> None:
    told = "The step calls time.time at net.py:164 in step, which does more than compute. Do it outside."
    assert LINES.sub("", first_sentence(told)) == "The step calls time.time, which does more than compute"


def test_the_table_fits_and_counts() -> None:
    found = {
        "list_of_numbers": Outcome("list_of_numbers", "live", 2, "it reads | a value " * 20),
        "dropout": Outcome("dropout", "refused", None, "why"),
    }
    lines = list(table(found))
    (counts,) = (line for line in lines if line.startswith(f"2 idioms, {CALLS} calls each"))
    assert counts.endswith(": 1 live, 1 refused.")
    assert row(found["dropout"]) == "| dropout | refused | - | why |"
    assert max(map(len, lines)) <= 120
    assert "## random_numbers" in lines
    assert "## schedulers" not in lines


def test_the_command_prints_the_judgement_of_the_tests(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["dropout", "operator_without_a_fake_kernel"]
    monkeypatch.setattr("sys.argv", ["idiom_table", "--json", "--idiom", *names])
    wrong = idiom_table.main()
    printed = capsys.readouterr()
    rows = {one["name"]: one for one in json.loads(printed.out)}
    assert set(rows) == set(names)
    for name, one in rows.items():
        found = outcome(IDIOMS[name])
        assert (one["kind"], one["pieces"], one["reason"]) == (found.kind, found.pieces, found.reason)
    assert bool(wrong) == any(one["kind"] in ("refused", "wrong") for one in rows.values())
    assert "100%" in printed.err


@pytest.mark.parametrize("may_go_live", [True])
def test_a_process_that_has_used_torch_compile_gives_the_same_pieces(
    may_go_live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not validate the arguments of distributions any more, and to validate asks for values."""
    kind, name = torch.distributions.Distribution, "returns_computed_backwards"
    pieces = []
    for validates in (True, False):
        monkeypatch.setattr(kind, "_validate_args", validates)
        pieces.append(outcome(IDIOMS[name]).pieces)
        assert kind._validate_args is validates
    assert pieces[0] == pieces[1] > 1
