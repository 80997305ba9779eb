"""Optimizers as libraries write them, which keep numbers of Python and move them in every step, train as in eager code.

No graph holds such numbers: the steps are live.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.harness.training import backward_and_step
from wholestep.api.report.live_explanation import LiveExplanation
from wholestep.errors import CaptureError, HyperparameterError

HERE = Path(__file__).name


class Counting(torch.optim.Optimizer):
    """An optimizer as libraries write them: Python numbers in groups, in the state, and in attributes."""

    def __init__(self, params: Any, lr: float = 0.1, *, late: bool = False) -> None:
        super().__init__(params, {"lr": lr, **({} if late else {"step": 0})})
        self.calls, self.mode = 0, "fresh"

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        self.mode = "used"
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            warm = min(1.0, group["step"] / 3)
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state.update(step=0, first=True, mean=torch.zeros_like(param), rate=group["lr"] * 0.5)
                state["step"] += 1
                state["first"] = False
                state["rate"] *= 1 - group["lr"]
                state["mean"] = state["mean"].lerp(param.grad, 0.1)  # another tensor each time
                bias = 1 - math.pow(0.9, state["step"])
                param.add_(state["mean"], alpha=-warm * math.exp(-state["rate"]) / math.sqrt(bias) / self.calls)


def made(kind: Any = Counting, **options: Any) -> Any:
    """A model and its optimizer."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    return model, kind(model.parameters(), **options)


def train(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
    return backward_and_step(model(x).square().sum(), opt).detach()


def assert_equal_training(eager: Any, ours: Any) -> None:
    """Parameters, state and groups are the same, bit for bit."""
    for a, b in zip(eager[0].parameters(), ours[0].parameters(), strict=True):
        assert torch.equal(a, b)
        want, came = eager[1].state[a], ours[1].state[b]
        assert want.keys() == came.keys()
        for key, value in want.items():
            assert type(value) is type(came[key]), key
            assert torch.equal(value, came[key]) if isinstance(value, Tensor) else value == came[key], key
    for want, came in zip(eager[1].param_groups, ours[1].param_groups, strict=True):
        assert {**want, "params": 0} == {**came, "params": 0}
    assert (eager[1].calls, eager[1].mode) == (ours[1].calls, ours[1].mode)


class Averaging(Counting):
    """An int that becomes a float."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.average: float = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        self.average = 0.5 * self.average + self.calls / 4
        self.param_groups[0]["params"][0].mul_(1 - 0.01 * self.average)


class Decaying(Counting):
    """Its rate is one of the numbers that it moves."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["lr"] = group["lr"] * 0.5 if group["step"] % 2 else 0.2


class Swapping(Counting):
    """Tensors of its state change places."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for state in self.state.values():
            state.setdefault("a", torch.ones_like(state["mean"]))
            state.setdefault("b", torch.zeros_like(state["mean"]))
            state["a"], state["b"] = state["b"], state["a"]


class Rows(Counting):
    """Numbers that are equal for all parameters until they differ."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for param, state in self.state.items():
            state["rows"] = state.get("rows", 0) + (len(param) if state["step"] > 2 else 1)
            param.mul_(1 - 0.001 * state["rows"])


class Loose(Counting):
    """State that belongs to no parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        group = self.param_groups[0]
        group.setdefault("k", torch.zeros(())).add_(1)
        group["seen"] = group.get("seen", 0) + 2
        group["params"][0].mul_(1 - 0.01 * group["k"])


class Subtracting(Counting):
    """Gives kernels of torch numbers that it computes."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            params = list(group["params"])
            for param in params:
                self.state[param].setdefault("old", param.clone())
            old = [self.state[param]["old"] for param in params]
            size = group["lr"] * math.sqrt(1 - 0.9**self.calls)
            torch._foreach_sub_(old, [param.grad for param in params], alpha=size)
            torch._foreach_lerp_(params, old, weight=1 / self.calls)


def sets(call: int, opt: Any) -> None:
    if call == 2:
        opt.param_groups[0].update(step=40, lr=0.3)
        opt.calls = 7


def loads(call: int, opt: Any) -> None:
    if call == 3:
        held = copy.deepcopy(opt.state_dict())
        held["param_groups"][0]["step"] = 1
        for state in held["state"].values():
            state["step"] = 2
        opt.load_state_dict(held)


def parts(call: int, opt: Any) -> None:
    if call == 3:
        opt.state[opt.param_groups[0]["params"][0]]["step"] = 90


KINDS = [Counting, partial(Counting, late=True), Averaging, Decaying, Swapping, Rows, Loose, Subtracting]


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize("between", [lambda call, opt: None, sets, loads, parts], ids=["", "sets", "loads", "parts"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: getattr(kind, "__name__", "late"))
def test_it_trains_as_in_eager_code(kind: Any, between: Callable[[int, Any], None], may_go_live: bool) -> None:
    if kind is Subtracting and between in (loads, parts):
        pytest.skip("keeps no such state")
    eager, ours = made(kind), made(kind)
    step = ws.compile(train, backend="eager")
    for call in range(6):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(call))
        assert torch.equal(train(*eager, x), step(*ours, x))
        assert_equal_training(eager, ours)
        for _, opt in (eager, ours):
            between(call, opt)
    assert isinstance(step.explain(), LiveExplanation)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: getattr(kind, "__name__", "late"))
def test_it_is_no_graph_and_as_it_was(kind: Any) -> None:
    model, opt = made(kind)
    before = copy.deepcopy((opt.state_dict(), opt.calls, opt.mode))
    with pytest.raises(CaptureError, match=rf"opt\.(groups\.0\.)?\w+(\.0\.weight)? at .*{HERE}:\d+ in step"):
        ws.compile(train, backend="eager", fullgraph=True)(model, opt, torch.ones(3, 4))
    assert repr((opt.state_dict(), opt.calls, opt.mode)) == repr(before)


def test_state_that_begins_as_an_empty_dict_is_looked_at() -> None:
    """Some optimizers touch ``self.state[p]`` before the first step (schedule-free ones do). This one is a graph."""

    class Touching(torch.optim.Optimizer):
        calls = mode = None

        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})
            assert [self.state[param] for param in self.param_groups[0]["params"]] == [{}] * 4

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for param in self.param_groups[0]["params"]:
                state = self.state[param]
                if "mean" not in state:
                    state["mean"] = torch.zeros_like(param)
                param.sub_(state["mean"].lerp_(param.grad, 0.5))

    eager, ours = made(Touching), made(Touching)
    step = ws.compile(train, backend="eager", fullgraph=True)
    for call in range(4):
        x = torch.full((6, 4), float(call))
        assert torch.equal(train(*eager, x), step(*ours, x))
        assert_equal_training(eager, ours)


@pytest.mark.parametrize("value", [[torch.zeros(2)], {"a": torch.zeros(2)}], ids=["list", "dict"])
def test_tensors_in_containers_of_the_state_are_refused(value: Any) -> None:
    model, opt = made()

    def step(x: Tensor) -> Tensor:
        opt.state[model[0].weight]["held"] = [x.sum(0)] if isinstance(value, list) else {"a": x.sum(0)}  # type: ignore[index]
        return x

    with pytest.raises(CaptureError, match="creates state 'held' in a form that cannot be put back"):
        ws.compile(step, backend="eager", fullgraph=True)(torch.ones(3, 4))
    assert len(opt.state) == 0


def test_what_is_no_number_is_refused() -> None:
    model, opt = made()

    def step(x: Tensor) -> Tensor:
        opt.state[model[0].weight]["log"] = ["a", "b"]  # type: ignore[index]
        return x

    with pytest.raises(HyperparameterError, match=r"leaves a list in opt\.log\.0\.weight at .*, which was nothing"):
        ws.compile(step, backend="eager", fullgraph=True)(torch.ones(3, 4))
    assert len(opt.state) == 0
