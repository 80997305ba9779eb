"""Branches on host scalars become predicates: a flip is one retrace that names the condition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.harness.training import backward_and_step
from tests.unit.capture.steps import Make, branch_guard, captured, differing, run_both, train
from wholestep.errors import CaptureError

HERE = Path(__file__).name


def linear(kind: Any, **options: Any) -> Make:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(4, 2)
        return model, kind(model.parameters(), **options)

    return make


def two_phases(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    if opt.param_groups[0]["lr"] > 0.05:  # <- the condition
        loss = loss * 2
    return backward_and_step(loss, opt)


CONDITION = f"{HERE}:{two_phases.__code__.co_firstlineno + 2}"


def test_a_branch_on_a_rate_is_a_predicate() -> None:
    model, opt = linear(torch.optim.SGD, lr=0.1)()
    guards = captured(two_phases, model, opt, torch.ones(3, 4)).guards
    branches = branch_guard(guards)
    assert branches is not None
    number = branches.lines.index(CONDITION)
    assert branches.truths[number] is True
    opt.param_groups[0]["lr"] = 0.01
    assert branches.truths_for([source() for source in branches.sources])[number] is False


def test_a_flip_is_one_retrace_that_names_the_condition_and_the_old_graph_is_kept() -> None:
    rates = (0.1, 0.07, 0.01, 0.02, 0.3, 0.02)

    def change(call: int, opt: torch.optim.Optimizer) -> None:
        opt.param_groups[0]["lr"] = rates[call]

    info = run_both(linear(torch.optim.SGD, lr=0.1), len(rates), change, step=two_phases).cache_info()
    assert (info.traces, info.hits) == (2, 4)
    assert info.reasons == (f"the condition at {CONDITION} was True, is False",)


@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "single"])
def test_radam_is_captured_again_once_when_its_rectification_starts(foreach: bool) -> None:
    info = run_both(linear(torch.optim.RAdam, lr=0.01, foreach=foreach), 9).cache_info()
    assert (info.traces, info.hits) == (2, 7)
    (reason,) = info.reasons
    assert reason.startswith("the condition at training.py:")
    assert reason.endswith("was False, is True")
    assert run_both(linear(torch.optim.RAdam, lr=0.01, foreach=foreach), 5).cache_info().traces == 1


def test_a_weight_decay_that_is_switched_on_is_seen() -> None:
    decays = (0.0, 0.2, 0.4, 0.0)

    def change(call: int, opt: torch.optim.Optimizer) -> None:
        opt.param_groups[0]["weight_decay"] = decays[call]

    step = run_both(linear(torch.optim.SGD, lr=0.1, foreach=False), len(decays), change)
    assert step.cache_info().traces == 2


def test_a_branch_on_data_is_no_predicate() -> None:
    model, opt = linear(torch.optim.SGD, lr=0.1)()

    def branching(x: Tensor) -> Tensor:
        loss = train(model, opt, x)
        return loss * 2 if loss.item() * opt.param_groups[0]["lr"] > 1 else loss

    with pytest.raises(ws.CaptureError, match=f"{HERE}:{branching.__code__.co_firstlineno + 2}"):
        captured(branching, torch.ones(3, 4))


def test_a_condition_on_a_step_counter_uses_its_value_within_the_step() -> None:
    """The counter has been raised in the graph when Python asks; the value at entry would answer wrongly."""

    def late(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
        train(model, opt, x)
        count = opt.state[model.weight]["step"].item()  # type: ignore[index]
        return x.sum() * (2 if count > 2 else 1)

    step = run_both(linear(torch.optim.Adam, lr=0.01), 5, step=late, batch=lambda: torch.ones(3, 4))
    assert step.cache_info().traces == 2


def test_predicates_do_not_move_the_state() -> None:
    model, opt = linear(torch.optim.RAdam, lr=0.01)()
    found = captured(train, model, opt, torch.ones(3, 4))
    branches = branch_guard(found.guards)
    assert branches is not None
    for _ in range(7):
        branches.truths_for([source() for source in branches.sources])
    assert all(held["step"] == 0 for held in opt.state.values())


class CountsOnTheDevice(torch.optim.Optimizer):
    """As capturable optimizers do: steps are counted in a tensor, and a rate is raised to their power."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"beta": 0.9})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    steps = self.state[param].setdefault("steps", torch.zeros(1))
                    steps += 1
                    param.sub_(param.grad * (1 - torch.pow(group["beta"], steps)))


def test_a_fake_kernel_may_branch_on_a_rate() -> None:
    """``pow`` of a number and a tensor asks whether the number is one while operators are sent to the meta device."""
    run_both(linear(CountsOnTheDevice), 3)


class Counting(nn.Module):
    """Counts its calls in a buffer, and looks at it."""

    def __init__(self, dtype: torch.dtype, device: str = "cpu") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("count", torch.zeros((), dtype=dtype, device=device))
        self.count: Tensor

    def forward(self, x: Tensor) -> Tensor:
        first = bool(self.count == 0)  # <- a comparison
        factor = 1.0 if self.count else 3.0  # <- the number itself
        self.count += 1
        return (x * self.weight * (2.0 if first else 1.0)).square().mean() * factor


def counted(model: Counting, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
    return backward_and_step(model(x), opt)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.int32])
def test_a_module_may_look_at_what_it_counts(dtype: torch.dtype) -> None:
    """As AveragedModel does. The count goes on within the graph, and is put back by the user in the end."""
    pair = [Counting(dtype), Counting(dtype)]
    opts = [torch.optim.SGD(model.parameters(), lr=0.1) for model in pair]
    step = ws.compile(counted, backend="eager")
    for number in range(5):
        if number == 3:
            for model in pair:
                model.count.zero_()
        x = torch.randn(3, 4)
        assert torch.equal(counted(pair[0], opts[0], x), step(pair[1], opts[1], x))
        assert differing(*pair) == []
    info = step.cache_info()
    assert (info.traces, info.hits) == (2, 3)
    line = Counting.forward.__code__.co_firstlineno
    assert info.reasons == (f"the condition at {HERE}:{line + 1} was True, is False",)


def test_data_is_not_looked_at_as_a_count_is() -> None:
    """Nothing says what it will be."""

    def by_truth(x: Tensor) -> Tensor:
        return x if (x > 0).all() else -x

    with pytest.raises(CaptureError, match=r"the value of a tensor decides(.|\n)*Use torch\.where"):
        ws.compile(by_truth, backend="eager", fullgraph=True)(torch.randn(3))


@pytest.mark.parametrize("validate", [True, False])
def test_distributions_look_at_their_arguments_or_not(validate: bool) -> None:
    def step(x: Tensor) -> Tensor:
        return torch.distributions.Normal(x, 1.0, validate_args=validate).log_prob(x).mean()

    run, x = ws.compile(step, backend="eager"), torch.randn(3)
    assert torch.equal(run(x), step(x))
    bad = x / 0
    if validate:
        with pytest.raises(ValueError, match="Expected parameter"):
            step(bad * 0)
        with pytest.raises(ValueError, match="Expected parameter"):
            run(bad * 0)
    else:
        assert run(bad * 0).isnan()


def test_a_norm_that_averages_over_all_batches_is_told_what_helps() -> None:
    norm = nn.BatchNorm1d(4, momentum=None)
    with pytest.raises(CaptureError, match="give it a momentum"):
        ws.compile(norm.forward, backend="eager", fullgraph=True)(torch.randn(3, 4))
    assert norm.num_batches_tracked == 0


class Seeing(nn.Module):
    """Looks at a number of its own after a write of data or chance to it, directly or through other names of it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("seen", torch.tensor(1.0))
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        looked_at = self.seen.view(()) if self.how == "base" else self.seen
        written = self.seen if self.how in ("directly", "base") else self.seen.view(1)
        if self.how == "chance":
            written.uniform_(-5, 5)
        else:
            written.add_(x.sum())
        return x * 2 if looked_at > 0 else x * 3


@pytest.mark.parametrize("how", ["directly", "view", "base", "chance"])
def test_what_data_is_written_to_is_no_count(how: str) -> None:
    model = Seeing(how)
    with pytest.raises(CaptureError, match="the value of a tensor decides"):
        ws.compile(model.forward, backend="eager", fullgraph=True)(torch.full((3,), -4.0))
    assert model.seen == 1


def test_a_count_that_moves_through_a_view_is_counted_in_the_condition() -> None:
    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.tensor(1.0))
            self.seen: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.seen.view(1).add_(1)
            return x * 2 if self.seen < 4 else x * 3

    eager, ours = Viewed(), Viewed()
    step = ws.compile(ours.forward, backend="eager")
    for _ in range(5):
        x = torch.randn(3)
        assert torch.equal(eager(x), step(x))
        assert ours.seen == eager.seen
    assert step.cache_info().traces == 2
