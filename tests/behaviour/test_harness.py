"""The comparison itself must be able to fail: each kind of difference that it exists for is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.behaviour.harness import Case, Job, Run, differences, observe, play, same
from tests.behaviour.small_models import class_batches, mlp, usual_job


class Spoiled(Run):
    """Eager code whose step does something wrong after each call."""

    def __init__(self, spoil: Callable[[Any], object]) -> None:
        self.spoil = spoil

    def compile(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        cells = dict(zip(fn.__code__.co_freevars, (cell.cell_contents for cell in fn.__closure__ or ()), strict=True))

        def step(*args: Any) -> Any:
            returned = fn(*args)
            replaced = self.spoil(cells)
            return returned if replaced is None else replaced

        return step


def one_bit(cells: Any) -> None:
    weight = cells["model"][0].weight
    weight.data[0, 0] = torch.nextafter(weight.data[0, 0], torch.tensor(10.0))


def gradient_kept(cells: Any) -> None:
    cells["model"][0].bias.grad = torch.zeros(8)


def state_kept(cells: Any) -> None:
    cells["opt"].state[cells["model"][0].weight]["more"] = torch.zeros(())


def rate_changed(cells: Any) -> None:
    cells["opt"].param_groups[0]["lr"] = 0.2


def parameter_exchanged(cells: Any) -> None:
    """Equal values in another object: the optimizer would go on with the old one."""
    cells["model"][0].bias = torch.nn.Parameter(cells["model"][0].bias.detach().clone())


def number_drawn(cells: Any) -> None:
    torch.rand(())


def flag_changed(cells: Any) -> None:
    cells["model"][1].eval()


def other_type_returned(cells: Any) -> float:
    return 1.0


SPOILS = [
    one_bit,
    gradient_kept,
    state_kept,
    rate_changed,
    parameter_exchanged,
    number_drawn,
    flag_changed,
    other_type_returned,
]


def usual(run: Run) -> Job:
    return usual_job(run, mlp())


@pytest.mark.parametrize("spoil", SPOILS, ids=lambda spoil: spoil.__name__)
def test_a_wrong_step_is_found_at_its_first_call(spoil: Callable[[Any], object]) -> None:
    case = Case(name="usual", build=usual)
    found = differences(play(case, Run()), play(case, Spoiled(spoil)))
    assert any(one.startswith("call 0") for one in found)


def test_the_same_run_twice_is_the_same() -> None:
    case = Case(name="usual", build=usual)
    assert differences(play(case, Run()), play(case, Run())) == []


def test_a_missing_call_is_found() -> None:
    records = play(Case(name="usual", build=usual), Run())
    assert differences(records, records[:-1])


def test_a_fake_tensor_is_found() -> None:
    with FakeTensorMode(), pytest.raises(AssertionError, match="FakeTensor"):
        list(observe({"left": torch.zeros(2)}, "objects"))


def test_leaves_are_the_same_only_in_value_type_and_shape() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert same(nan, nan.clone())
    assert not same(nan, torch.tensor([float("nan"), 2.0]))
    assert not same(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    assert not same(torch.zeros(1), torch.zeros(()))
    assert not same(1, 1.0)
    assert not same(True, 1)
    assert same(torch.ones(1), torch.ones(1) + 1e-6, tolerance=1e-5)
    assert not same(torch.ones(1), torch.ones(1) + 1e-4, tolerance=1e-5)
    assert not same(torch.ones(1, dtype=torch.long), torch.zeros(1, dtype=torch.long), tolerance=2.0)


def test_a_tolerance_needs_a_reason() -> None:
    with pytest.raises(ValueError, match="reason"):
        Case(name="loose", build=usual, tolerance=1e-3)


def test_batches_differ_between_ranks_and_calls() -> None:
    first, second = Run(), Run()
    second.rank = 1
    assert not torch.equal(class_batches(first)[0][0], class_batches(second)[0][0])
    assert not torch.equal(class_batches(first)[0][0], class_batches(first)[1][0])


def test_a_written_batch_is_recorded() -> None:
    """The harness looks at the batch after the call, so that a step that writes into it is compared, too."""
    job = Job(step=lambda x, y: x.zero_(), batches=class_batches(Run()), objects={})
    records = play(Case(name="zero", build=lambda run: job), Run())
    assert torch.equal(records[0]["batch[0]"], torch.zeros(5, 6))  # type: ignore[arg-type]
