"""Numbers of an optimizer that a step itself moves go on from call to call as in eager code, with one trace for all."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.harness.training import backward_and_step
from wholestep.capture.bind.effects import WriteNumber
from wholestep.errors import CaptureError, HyperparameterError


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


CALLS = 0


def count_and_train(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    return train(model, opt, x)


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


def train_both(
    eager: Any, ours: Any, between: Callable[[int, Any], None] = lambda call, opt: None, num_calls: int = 6
) -> ws.CompiledStep:
    step = ws.compile(train, backend="eager")
    for call in range(num_calls):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(call))
        assert torch.equal(train(*eager, x), step(*ours, x))
        assert_equal_training(eager, ours)
        for _, opt in (eager, ours):
            between(call, opt)
    return step


@pytest.mark.parametrize("late", [False, True])
def test_an_optimizer_that_counts_in_python_is_traced_twice(late: bool) -> None:
    """The first call makes its state, the second goes on from there, and so do all others."""
    step = train_both(made(late=late), made(late=late))
    assert step.cache_info().traces == 2, step.cache_info().reasons


def test_a_number_that_is_set_between_calls_is_read() -> None:
    def change(call: int, opt: Any) -> None:
        if call == 2:
            opt.param_groups[0].update(step=40, lr=0.3)
            opt.calls = 7

    step = train_both(made(), made(), change)
    assert step.cache_info().traces == 2, step.cache_info().reasons


def test_a_loaded_state_is_gone_on_with() -> None:
    def load(call: int, opt: Any) -> None:
        if call == 3:
            held = copy.deepcopy(opt.state_dict())
            held["param_groups"][0]["step"] = 1
            for state in held["state"].values():
                state["step"] = 2
            opt.load_state_dict(held)

    train_both(made(), made(), load)


def test_one_number_for_all_parameters_until_they_differ() -> None:
    def part(call: int, opt: Any) -> None:
        if call == 3:
            opt.state[opt.param_groups[0]["params"][0]]["step"] = 90

    ours = made()
    step = train_both(made(), ours, part)
    binding = step._dispatcher.entries[1].captured.binding
    counters = [one.counter for one in binding.effects_of(WriteNumber)]
    assert sorted(len(one.places) for one in counters) == [1, 1, 4, 4]
    assert "another number" in step.cache_info().reasons[-1]


def test_an_int_that_becomes_a_float_goes_on() -> None:
    class Averaging(Counting):
        def __init__(self, params: Any) -> None:
            super().__init__(params)
            self.average: float = 0

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            super().step()
            self.average = 0.5 * self.average + self.calls / 4

    eager, ours = made(Averaging), made(Averaging)
    train_both(eager, ours)
    assert type(ours[1].average) is float
    assert eager[1].average == ours[1].average > 1


def test_a_rate_that_the_step_moves_goes_on() -> None:
    def decaying(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss = train(model, opt, x)
        for group in opt.param_groups:
            group["lr"] = group["lr"] * 0.5 if group["step"] % 2 else 0.2
        return loss

    eager, ours = made(), made()
    step = ws.compile(decaying, backend="eager")
    for _ in range(6):
        assert torch.equal(decaying(*eager, torch.ones(3, 4)), step(*ours, torch.ones(3, 4)))
        assert_equal_training(eager, ours)


def test_a_fused_kernel_takes_what_the_step_computes() -> None:
    """From the group, by itself and for two kernels, and beside numbers that stay."""

    def make() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        groups = [{"params": list(layer.parameters())} for layer in model]
        return model, torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), fused=True)

    def decaying(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
        first, second = opt.param_groups
        for _ in range(2):
            loss = train(model, opt, x)
            first["lr"] *= 0.5
            second["lr"], second["betas"] = 0.3 * first["lr"], (1 - first["lr"], 0.95)
        return loss

    eager, ours = make(), make()
    step = ws.compile(decaying, backend="eager")
    for call in range(4):
        for _, opt in (eager, ours):
            if call == 2:
                opt.param_groups[0]["lr"] = 0.2
        assert torch.equal(decaying(*eager, torch.ones(3, 4)), step(*ours, torch.ones(3, 4)))
        held = [[{**group, "params": None} for group in opt.param_groups] for _, opt in (eager, ours)]
        assert held[0] == held[1]
        assert all(map(torch.equal, eager[0].parameters(), ours[0].parameters()))
    assert step.cache_info().hits >= 2


def test_tensors_of_the_state_that_change_places_go_on() -> None:
    class Swapping(Counting):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            super().step()
            for state in self.state.values():
                state.setdefault("a", torch.ones_like(state["mean"]))
                state.setdefault("b", torch.zeros_like(state["mean"]))
                state["a"], state["b"] = state["b"], state["a"]

    step = train_both(made(Swapping), made(Swapping))
    assert step.cache_info().traces == 2, step.cache_info().reasons


def test_state_that_begins_as_an_empty_dict_is_looked_at() -> None:
    """Some optimizers touch ``self.state[p]`` before the first step (schedule-free ones do)."""

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

    train_both(made(Touching), made(Touching))


def test_numbers_that_are_equal_until_the_step_changes_one_go_on() -> None:
    class Rows(Counting):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            super().step()
            for param, state in self.state.items():
                state["rows"] = state.get("rows", 0) + (len(param) if state["step"] > 2 else 1)

    train_both(made(Rows), made(Rows))


def test_state_that_belongs_to_no_parameter_goes_on() -> None:
    class Loose(Counting):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            super().step()
            self.state.setdefault("k", torch.zeros(()))  # type: ignore[arg-type, call-overload]
            self.state["k"] += 1  # type: ignore[index]
            self.state["seen"] = self.state.get("seen", 0) + 2  # type: ignore[index, call-overload]
            self.param_groups[0]["params"][0].mul_(1 - 0.01 * self.state["k"])  # type: ignore[index]

    eager, ours = made(Loose), made(Loose)
    step = ws.compile(train, backend="eager")
    for call in range(1, 5):
        assert torch.equal(train(*eager, torch.ones(3, 4)), step(*ours, torch.ones(3, 4)))
        assert ours[1].state["k"] == call
        assert ours[1].state["seen"] == 2 * call
    assert all(torch.equal(a, b) for a, b in zip(eager[0].parameters(), ours[0].parameters(), strict=True))


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

    with pytest.raises(HyperparameterError, match=r"leaves a list in opt\.log\.0\.weight, which was nothing"):
        ws.compile(step, backend="eager", fullgraph=True)(torch.ones(3, 4))
    assert len(opt.state) == 0


def test_a_counter_that_goes_away_is_refused() -> None:
    model, opt = made()
    opt.param_groups[0]["step"] = 5

    def step(x: Tensor) -> Tensor:
        train(model, opt, x)
        if opt.calls > 1:
            del opt.param_groups[0]["step"]
        return x

    compiled = ws.compile(step, backend="eager", fullgraph=True)
    compiled(torch.ones(3, 4))
    with pytest.raises((CaptureError, HyperparameterError), match=r"opt\.groups\.0\.step|opt\.step"):
        compiled(torch.ones(3, 4))
    assert opt.param_groups[0]["step"] == 6


def test_kernels_of_torch_may_ask_for_a_number_of_the_step() -> None:
    """``_foreach_sub`` asks whether its alpha is 1; nothing that it makes depends on it."""

    class Subtracting(Counting):
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

    train_both(made(Subtracting), made(Subtracting))


def test_an_optimizer_that_keeps_nothing_but_a_late_count_is_traced_twice() -> None:
    class Late(torch.optim.Optimizer):
        calls = mode = None

        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1
                for param in group["params"]:
                    param.sub_(param.grad, alpha=group["lr"] / group["count"])

    step = train_both(made(Late), made(Late))
    assert step.cache_info().reasons == ("opt.groups.0.count was nothing, is 1",)
