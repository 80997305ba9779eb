"""Numbers that change between calls: constants of the first trace, inputs of the next one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import wholestep as ws
from tests.unit.capture.changing_numbers import (
    CALLS,
    Give,
    Step,
    Training,
    assert_same,
    batch,
    numbers,
    sets,
    switched,
    train_both,
    trained,
    weighted,
)
from wholestep.capture.scalars import varying_numbers

OFFSET = 0.0
"""A global that tests set between calls."""


def warmed_up(training: Training) -> Step:
    def step(x: Tensor, number: int) -> Tensor:
        rate = min(1.0, (number + 1) / 3) * (1 + math.cos(math.pi * number / 9))
        return training.update(training.model(x).square().mean() * rate)

    return step


def returned(training: Training) -> Step:
    def step(x: Tensor, number: int) -> dict[str, Any]:
        loss = training.update(training.model(x).mean())
        return {"loss": loss, "number": number, "next": number + 1, "half": number / 2}

    return step


def shifted(training: Training) -> Step:
    def step(x: Tensor, number: int) -> Tensor:
        targets = (torch.arange(5) + number) % 4
        return training.update(F.cross_entropy(training.model(x), targets))

    return step


def bits(training: Training) -> Step:
    return lambda x, number: training.update(training.model(x).mean() * (1 + (number & 2) + number // 2 + number % 3))


def plain(training: Training) -> Step:
    return lambda x: training.update(training.model(x).square().mean() + OFFSET * training.model(x).mean())


def set_offset(training: Training, number: int) -> None:
    globals()["OFFSET"] = number / 3


@pytest.fixture(autouse=True)
def _offset(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(globals(), "OFFSET", 0.0)
    return


ONE_MORE: dict[str, tuple[Callable[[Training], Step], Give]] = {
    "a weight": (weighted, lambda training, number: (0.9**number,)),
    "a whole number as a weight": (weighted, numbers),
    "an int in a tensor of ints": (shifted, numbers),
    "bits of it": (bits, numbers),
    "returned": (returned, numbers),
    "an attribute": (plain, sets(lambda training, number: setattr(training.model, "temperature", 1 + number / 4))),
    "an item of a list": (plain, sets(lambda training, number: training.model.weights.__setitem__(1, number / 7))),
    "a global": (plain, sets(set_offset)),
}


@pytest.mark.parametrize("name", ONE_MORE)
def test_a_number_that_changes_is_traced_once_more(name: str, kind: str) -> None:
    step = train_both(*ONE_MORE[name])
    info = step.cache_info()
    assert (info.traces + info.loaded, info.hits) == (2, CALLS - 2)
    (reason,) = info.reasons
    assert " was " in reason
    assert (step._stats.fast_hits > 0) == (kind == "native")


@pytest.mark.parametrize("make", [switched, warmed_up])
def test_what_python_asks_of_a_number_is_asked_at_every_call(make: Callable[[Training], Step], kind: str) -> None:
    info = train_both(make, numbers).cache_info()
    assert (info.traces + info.loaded, info.hits) == (3, CALLS - 3)
    assert "the condition at" in info.reasons[1]


def test_a_number_that_never_changes_is_a_constant() -> None:
    step = train_both(weighted, lambda training, number: (0.5,))
    assert step.cache_info().traces == 1
    assert not [one for one in step.program().inputs if "argument" in one.name]


def test_a_number_that_changes_is_an_input_that_the_program_names() -> None:
    step = train_both(weighted, lambda training, number: (0.9**number,))
    assert [(one.name, one.dtype) for one in step.program().inputs if "argument" in one.name] == [
        ("argument 1", torch.float64)
    ]


def test_numbers_given_by_name_and_by_place_are_told_apart() -> None:
    def run(training: Training) -> Step:
        def step(x: Tensor, first: float, tree: dict[str, Any], *, second: float) -> Tensor:
            return training.update(training.model(x).mean() * first + second * tree["deep"] * training.model(x).sum())

        return step

    def give(training: Training, number: int) -> tuple[Any, ...]:
        return (number / 3, {"deep": 2, "x": torch.ones(1)}, number / 5)

    def keyed(step: Step) -> Step:
        return lambda x, first, tree, second: step(x, first, tree, second=second)

    _, wanted = trained(run, give, keyed)
    made: list[Any] = []

    def compile_it(step: Step) -> Step:
        made.append(ws.compile(step, backend="eager"))
        return keyed(made[0])

    _, found = trained(run, give, compile_it)
    assert_same(found, wanted)
    assert made[0].cache_info().traces + made[0].cache_info().loaded == 2
    assert {one.name for one in made[0].program().inputs if "argument" in one.name} == {"argument 1", "argument 4"}


def test_numbers_in_lists_dicts_and_tuples_are_inputs(kind: str) -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor, tree: dict[str, Any]) -> Tensor:
            (offset, (deep,)), more = tree["numbers"], tree["more"]
            assert type(tree) is dict
            assert type(tree["numbers"]) is list
            return training.update(training.model(x + offset).mean() * deep + training.model(more["x"]).sum() * 0.1)

        return step

    def give(training: Training, number: int) -> tuple[Any, ...]:
        return ({"numbers": [number / 3, (number + 1,)], "more": {"x": batch(number + 50), "constant": 3}},)

    step = train_both(make, give)
    assert step.cache_info().traces + step.cache_info().loaded == 2
    assert len([one for one in step.program().inputs if "argument" in one.name]) == 2
    assert (step._stats.fast_hits > 0) == (kind == "native")


def test_a_step_that_writes_to_its_dict_of_numbers_is_refused() -> None:
    """The dict is a copy while such a step is traced."""
    given = [{"number": number} for number in (1.0, 2.0, 0.0)]

    @ws.compile(backend="eager", fullgraph=True)
    def step(x: Tensor, tree: dict[str, Any]) -> Tensor:
        if tree["number"] < 0.5:
            tree["twice"] = tree["number"] * 2
        return x * tree["number"]

    for one in given[:2]:
        step(torch.ones(2), one)
    with pytest.raises(ws.CaptureError, match="writes to argument 1"):
        step(torch.ones(2), given[2])
    assert given[2] == {"number": 0.0}


def test_two_of_three_numbers_become_inputs(captures: list[int]) -> None:
    def make(training: Training) -> Step:
        return lambda x, beta, size, gamma: training.update(training.model(x[:size]).mean() * beta * gamma)

    info = train_both(make, lambda training, number: (number / 5, 1 + number % 3, 1 / (1 + number))).cache_info()
    # By size, and the very first one.
    assert info.traces + info.loaded == 4
    # The second: with all three, with each besides those that could be inputs, and with those.
    assert [one for one in captures if one] == [3, 1, 2, 2, 2, 2, 2]


def test_a_tensor_that_is_another_one_again_is_no_input() -> None:
    """Once is a new tensor; twice is a batch, for which no graph is traced again and again."""
    held = {"x": torch.ones(2)}
    step = ws.compile(lambda: held["x"] * 2, backend="eager", fullgraph=True)
    for number in (1.0, 2.0):
        held["x"] = torch.full((2,), number)
        assert step()[0] == 2 * number
    held["x"] = torch.full((2,), 3.0)
    with pytest.raises(ws.CaptureError, match=r"x is another tensor in every call.*pass it as an argument"):
        step()
    assert step.cache_info().traces == 2


def test_a_tensor_that_is_another_one_once_may_be_followed_by_other_changes() -> None:
    """Parameters are replaced, and later calls are compared with the trace of those before."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout())
    opt = torch.optim.Adam(net.parameters(), lr=0.1)

    def train(x: Tensor) -> Tensor:
        loss = net(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    step = ws.compile(train, backend="eager", fullgraph=True)
    for call in range(5):
        if call == 2:
            net.load_state_dict({name: one.clone() for name, one in net.state_dict().items()}, assign=True)
            opt.param_groups[0]["params"] = list(net.parameters())
            opt.state.clear()
        if call == 4:
            net.eval()
        step(torch.ones(2, 3))
    assert step.cache_info().traces == 3


@pytest.mark.parametrize("may_go_live", [True])
def test_a_tensor_that_is_another_one_again_goes_live(may_go_live: bool) -> None:
    held = {"x": torch.ones(2), "y": torch.ones(2)}
    step = ws.compile(lambda: held["x"] * 2 + held["y"], backend="eager")
    for number in (1.0, 2.0, 3.0, 4.0):
        held["x"], held["y"] = torch.full((2,), number), held["x"]
        assert torch.equal(step(), held["x"] * 2 + held["y"])
    assert len(step.cache_info().reasons) == 1


def test_tensors_that_take_turns_have_a_trace_each() -> None:
    tensors, held = [torch.ones(2), torch.zeros(2)], {}
    step = ws.compile(lambda: held["x"] * 2, backend="eager", fullgraph=True)
    for number in range(6):
        held["x"] = tensors[number % 2]
        assert torch.equal(step(), held["x"] * 2)
    assert step.cache_info().traces == 2


def test_inductor_takes_numbers_as_inputs() -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor, number: int, beta: float) -> tuple[Tensor, int]:
            targets = (torch.arange(5) + number) % 4
            loss = F.cross_entropy(training.model(x) * beta, targets) + number * training.model(x).square().mean()
            return training.update(loss), number + 1

        return step

    def give(training: Training, number: int) -> tuple[Any, ...]:
        return (number, 1 / (1 + number))

    _, wanted = trained(make, give, lambda step: step)
    step, found = trained(make, give, lambda step: ws.compile(step, backend="inductor"))
    for ((loss, then), state), ((other, now), others) in zip(found, wanted, strict=True):
        assert then == now
        torch.testing.assert_close([loss, *state], [other, *others], rtol=1e-4, atol=1e-5)
    assert step.cache_info().hits == CALLS - 2


def test_a_search_for_places_only_where_one_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most steps move nothing between calls: they are not asked where everything lies."""
    asked: list[Any] = []
    original = varying_numbers.identity
    monkeypatch.setattr("wholestep.capture.reach.step_context.identity", lambda one: asked.append(one) or original(one))
    train_both(weighted, lambda training, number: (0.5,))
    assert not asked


def test_the_next_process_traces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("WHOLESTEP_CACHE", "1")
    first, second = (train_both(switched, numbers).cache_info() for _ in range(2))
    assert (first.traces, first.loaded) == (3, 0)
    assert (second.traces, second.loaded) == (0, 3)
