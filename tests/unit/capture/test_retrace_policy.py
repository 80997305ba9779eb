"""Numbers that move between calls: constants of the first trace, inputs of the next one, and what can be none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wholestep as ws
from wholestep.capture.capture import capture
from wholestep.capture.scalars import counters
from wholestep.errors import RetraceLimitError

CALLS = 7
OFFSET = 0.0
"""A global that tests set between calls."""


def batch(number: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(number))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.temperature, self.weights, self.p, self.which = 1.0, [0.5, 1.0], 0.0, 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x) / self.temperature * self.weights[1]
        return out


@dataclass
class Training:
    """A model and an optimizer, and what a test sets between calls."""

    model: Net
    opt: torch.optim.Optimizer

    def update(self, loss: Tensor) -> Tensor:
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        return loss.detach()

    def state(self) -> list[Tensor]:
        held = [one for state in self.opt.state.values() for one in state.values() if isinstance(one, Tensor)]
        return [*(param.detach() for param in self.model.parameters()), *held]


Step = Callable[..., Any]
Give = Callable[[Training, int], tuple[Any, ...]]
"""Sets what there is to set before a call, and gives its arguments behind the batch."""


def trained(make: Callable[[Training], Step], give: Give, compiled: Callable[[Step], Step]) -> tuple[Any, list[Any]]:
    model = Net()
    training = Training(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    step = compiled(make(training))
    seen: list[Any] = []
    for number in range(CALLS):
        found = step(batch(number), *give(training, number))
        seen.append((found, [one.clone() for one in training.state()]))
    return step, seen


def assert_same(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    if isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        assert_same(list(found.values()), list(wanted.values()))
    else:
        assert torch.equal(found, wanted) if isinstance(wanted, Tensor) else found == wanted


def race(make: Callable[[Training], Step], give: Give) -> Any:
    """Trains by eager code and compiled, which has to be the same bits; gives the compiled step."""
    _, wanted = trained(make, give, lambda step: step)
    step, found = trained(make, give, lambda step: ws.compile(step, backend="eager"))
    assert_same(found, wanted)
    return step


def weighted(training: Training) -> Step:
    return lambda x, beta: training.update(training.model(x).square().mean() * beta)


def warmed_up(training: Training) -> Step:
    def step(x: Tensor, number: int) -> Tensor:
        for group in training.opt.param_groups:
            group["lr"] = 0.02 * min(1.0, (number + 1) / 3) * (1 + math.cos(math.pi * number / 9))
        return training.update(training.model(x).square().mean())

    return step


def switched(training: Training) -> Step:
    return lambda x, number: training.update(training.model(x).abs().mean() * (2 if number % 3 == 2 else 1))


def returned(training: Training) -> Step:
    def step(x: Tensor, number: int) -> dict[str, Any]:
        return {
            "loss": training.update(training.model(x).mean()),
            "number": number,
            "next": number + 1,
            "half": number / 2,
        }

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


def numbers(training: Training, number: int) -> tuple[Any, ...]:
    return (number,)


def sets(change: Callable[[Training, int], object]) -> Give:
    def give(training: Training, number: int) -> tuple[Any, ...]:
        change(training, number)
        return ()

    return give


def set_offset(training: Training, number: int) -> None:
    globals()["OFFSET"] = number / 3


@pytest.fixture(autouse=True)
def _offset(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(globals(), "OFFSET", 0.0)
    return


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each capture, how many numbers were to be inputs."""
    monkeypatch.setenv("WHOLESTEP_CACHE", "0")
    counts: list[int] = []

    def counted(step: Any, args: Any, kwargs: Any, varying: Any, moved: Any) -> Any:
        counts.append(len(varying))
        return capture(step, args, kwargs, varying, moved)

    monkeypatch.setattr("wholestep.api.stages.capture", counted)
    return counts


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
    step = race(*ONE_MORE[name])
    info = step.cache_info()
    assert (info.traces + info.loaded, info.hits) == (2, CALLS - 2)
    (reason,) = info.reasons
    assert " was " in reason
    assert (step._stats.fast_hits > 0) == (kind == "native")


@pytest.mark.parametrize("make", [switched, warmed_up])
def test_what_python_asks_of_it_is_asked_at_every_call(make: Callable[[Training], Step], kind: str) -> None:
    info = race(make, numbers).cache_info()
    assert (info.traces + info.loaded, info.hits) == (3, CALLS - 3)
    assert "the condition at" in info.reasons[1]


def test_one_that_never_changes_is_a_constant() -> None:
    step = race(weighted, lambda training, number: (0.5,))
    assert step.cache_info().traces == 1
    assert not [one for one in step.program().inputs if "argument" in one.name]


def test_it_is_an_input_that_the_program_names() -> None:
    step = race(weighted, lambda training, number: (0.9**number,))
    assert [(one.name, one.dtype) for one in step.program().inputs if "argument" in one.name] == [
        ("argument 1", torch.float64)
    ]


def test_names_and_places_of_arguments_are_told_apart() -> None:
    def run(training: Training) -> Step:
        def step(x: Tensor, first: float, nest: dict[str, Any], *, second: float) -> Tensor:
            return training.update(training.model(x).mean() * first + second * nest["deep"] * training.model(x).sum())

        return step

    def give(training: Training, number: int) -> tuple[Any, ...]:
        return (number / 3, {"deep": 2, "x": torch.ones(1)}, number / 5)

    def keyed(step: Step) -> Step:
        return lambda x, first, nest, second: step(x, first, nest, second=second)

    _, wanted = trained(run, give, keyed)
    made: list[Any] = []

    def compile_it(step: Step) -> Step:
        made.append(ws.compile(step, backend="eager"))
        return keyed(made[0])

    _, found = trained(run, give, compile_it)
    assert_same(found, wanted)
    assert made[0].cache_info().traces + made[0].cache_info().loaded == 2
    assert {one.name for one in made[0].program().inputs if "argument" in one.name} == {"argument 1", "argument 4"}


def test_in_lists_dicts_and_tuples_as_well(kind: str) -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor, nest: dict[str, Any]) -> Tensor:
            (offset, (deep,)), more = nest["numbers"], nest["more"]
            assert type(nest) is dict
            assert type(nest["numbers"]) is list
            return training.update(training.model(x + offset).mean() * deep + training.model(more["x"]).sum() * 0.1)

        return step

    def give(training: Training, number: int) -> tuple[Any, ...]:
        return ({"numbers": [number / 3, (number + 1,)], "more": {"x": batch(number + 50), "constant": 3}},)

    step = race(make, give)
    assert step.cache_info().traces + step.cache_info().loaded == 2
    assert len([one for one in step.program().inputs if "argument" in one.name]) == 2
    assert (step._stats.fast_hits > 0) == (kind == "native")


def test_a_step_that_writes_to_its_dict_of_numbers_sees_its_own() -> None:
    """The dict is a copy while such a step is traced. What is written to it is written to that of the call."""
    object_effects: list[dict[str, Any]] = []

    def give(training: Training, number: int) -> tuple[Any, ...]:
        object_effects.append({"number": number + 1})
        return (object_effects[-1],)

    def make(training: Training) -> Step:
        def step(x: Tensor, nest: dict[str, Any]) -> Tensor:
            nest["twice"] = nest["number"] * 2
            return training.update(training.model(x).mean() * nest["twice"])

        return step

    step = race(make, give)
    assert (step.cache_info().traces, step.cache_info().hits) == (2, CALLS - 2)
    assert object_effects == 2 * [{"number": number + 1, "twice": 2 * number + 2} for number in range(CALLS)]
    assert all(type(one["twice"]) is int for one in object_effects)


def named(training: Training) -> Step:
    return lambda x, names: training.update(training.model(x).mean())


def names_of(training: Training, number: int) -> tuple[Any, ...]:
    return ({"files": [f"{number}-{row}.png" for row in range(3)], "text": f"caption {number}"},)


def test_text_that_nobody_looks_at_may_be_any(kind: str, captures: list[int]) -> None:
    step = race(named, names_of)
    assert (step.cache_info().traces, step.cache_info().hits) == (2, CALLS - 2)
    assert captures == [0, 0, 4]  # with the texts as they are, to compare
    assert (step._stats.fast_hits > 0) == (kind == "native")


LOOKS: dict[str, Callable[[Any], Any]] = {
    "compares": lambda name: 2 if name == "1" else 1,
    "asks for its end": lambda name: 2 if name.endswith("1") else 1,
    "measures": lambda name: 1 + len(name),
    "looks it up": lambda name: {"1": 2}.get(name, 1),
    "writes it": lambda name: 1 + len(f"a{name}"),
    "joins it": lambda name: 1 + "1".join(["a", name]).count("1"),
    "looks into it": lambda name: 2 if "1" in name else 1,
    "reads it": lambda name: 1 + sum(letter == "1" for letter in name),
    "asks whether it is empty": lambda name: 2 if name else 1,
    "reads a number": lambda name: int(name) + 1,
    "asks for its type": lambda name: 2 if type(name) is str and hash(name) else 1,
    "adds it": lambda name: 1 + len("a" + name),
}


@pytest.mark.parametrize("how", LOOKS)
@pytest.mark.filterwarnings("ignore:text of a number")
def test_text_that_somebody_looks_at_stays_a_constant(how: str) -> None:
    def make(training: Training) -> Step:
        return lambda x, name: training.update(training.model(x).mean() * LOOKS[how](name))

    step = race(make, lambda training, number: (str(number),))
    assert step.cache_info().traces + step.cache_info().loaded == CALLS


def test_text_that_is_returned_stays_a_constant() -> None:
    def make(training: Training) -> Step:
        return lambda x, name: {"loss": training.update(training.model(x).mean()), "name": name}

    race(make, lambda training, number: (f"name {number}",))


def test_a_mode_by_name_is_a_trace_per_mode() -> None:
    def make(training: Training) -> Step:
        return lambda x, mode: training.update(F.gelu(training.model(x), approximate=mode).mean())

    info = race(make, lambda training, number: ("none" if number % 3 else "tanh",)).cache_info()
    assert info.traces + info.loaded == 2


def test_of_many_texts_and_a_number_the_number_may_be_an_input(captures: list[int]) -> None:
    def make(training: Training) -> Step:
        return lambda x, names, beta: training.update(training.model(x).mean() * beta * len(names[1]))

    race(make, lambda training, number: ([f"{number}" * n for n in range(1, 5)], number / 3))
    assert [one for one in captures if one][:4] == [5, 1, 5, 1]  # all; the number; with all texts; the number


TYPES: dict[str, Callable[[Any], float]] = {
    "isinstance": lambda number: number if isinstance(number, int) else 100,
    "type": lambda number: number if type(number) is int else 100,
}


@pytest.mark.parametrize("how", ["isinstance", "type"])
def test_a_symbol_that_is_taken_for_no_number_is_none(how: str) -> None:
    def make(training: Training) -> Step:
        return lambda x, number: training.update(training.model(x).mean() * TYPES[how](number))

    assert race(make, numbers).cache_info().hits == 0


def test_another_type_is_another_trace(kind: str) -> None:
    given = [1, 2, 0.5, 3, True, 4, 0.25]
    step = race(weighted, lambda training, number: (given[number],))
    assert any("True" in reason or "bool" in reason for reason in step.cache_info().reasons)
    assert step.cache_info().hits >= 2  # 3 and 4


def test_an_int_beyond_a_word_stays_a_constant() -> None:
    def make(training: Training) -> Step:
        return lambda x, number: training.update(training.model(x).mean() * (number % 7))

    info = race(make, lambda training, number: (2**70 + number,)).cache_info()
    assert info.traces + info.loaded == CALLS


STAY: dict[str, tuple[Callable[[Training], Step], str]] = {
    "a shape": (
        lambda training: lambda x, number: training.update(training.model(x[: 1 + number % 5]).mean()), "The shape"
    ),
    "an index": (
        lambda training: lambda x, number: training.update(training.model(x).mean() * [1.0, 2.0, 3.0][number % 3]), "",
    ),
    "a key of the result": (
        lambda training: lambda x, number: {f"loss {number}": training.update(training.model(x).mean())}, "text"
    ),
    "a method of numbers": (
        lambda training: lambda x, number: training.update(training.model(x).mean() * (1 + number.bit_length())), "",
    ),
    "a key": (
        lambda training: lambda x, number: training.update(training.model(x).mean() * {3: 2.0}.get(number, 1.0)), "",
    ),
    "a number for C++": (
        lambda training: lambda x, number: training.update(F.dropout(training.model(x), number / 100).mean()), "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STAY)
@pytest.mark.filterwarnings("ignore:text of a number")
def test_what_can_be_no_input_stays_a_constant(name: str) -> None:
    make, why = STAY[name]
    step = race(make, numbers)
    info = step.cache_info()
    assert info.traces + info.loaded == CALLS
    assert all("argument 1 was" in reason for reason in info.reasons)
    (told,) = step._stages.retraces._constant.values()
    assert told.startswith("Argument 1 can be no input of the graph: ")
    assert why in told


def test_two_of_three_can_be_inputs(captures: list[int]) -> None:
    def make(training: Training) -> Step:
        return lambda x, beta, size, gamma: training.update(training.model(x[:size]).mean() * beta * gamma)

    info = race(make, lambda training, number: (number / 5, 1 + number % 3, 1 / (1 + number))).cache_info()
    # By size, and the very first one.
    assert info.traces + info.loaded == 4
    # The second: with all three, with each besides those that could be inputs, and with those.
    assert [one for one in captures if one] == [3, 1, 2, 2, 2, 2, 2]


def test_what_can_be_no_input_is_found_out_once(captures: list[int]) -> None:
    race(STAY["a shape"][0], numbers)
    assert [one for one in captures if one] == [1]


def test_a_number_that_is_only_read_stays_the_object_it_is() -> None:
    """Python would tell of a write, and all that its object holds would be compared at the next call."""
    model = Net()
    step: Any = ws.compile(lambda x: model(x).sum(), backend="eager")
    for number in range(3):
        model.temperature = value = 1.5 + number
        step(batch(0))
        assert model.temperature is value


def test_the_limit_says_what_could_be_no_input() -> None:
    model = Net()

    @ws.compile(backend="eager", max_retraces=2)
    def step(x: Tensor, size: int) -> Tensor:
        return model(x[:size]).sum()

    for size in (1, 2, 3):
        step(batch(0), size)
    with pytest.raises(RetraceLimitError, match=r"Argument 1 can be no input of the graph: The shape of a tensor"):
        step(batch(0), 4)


def test_an_object_that_is_replaced_is_no_place_any_more() -> None:
    """Its number moved; the next one's is a constant again until it moves."""

    def make(training: Training) -> Step:
        return lambda x: training.update(training.model(x).mean() * holder[0].number)

    class Holder:
        def __init__(self, number: float) -> None:
            self.number = number

    holder = [Holder(1.0)]

    def change(training: Training, number: int) -> None:
        if number == 3:
            holder[0] = Holder(7.0)
        elif number:
            holder[0].number = number / 2

    def give(training: Training, number: int) -> tuple[Any, ...]:
        if number == 0:
            holder[0] = Holder(1.0)
        change(training, number)
        return ()

    race(make, give)


def test_a_number_on_a_parameter_is_a_constant() -> None:
    """While the step is traced a parameter has other attributes."""

    def make(training: Training) -> Step:
        weight: Any = training.model.body[0].weight
        return lambda x: training.update(training.model(x).mean() * weight.scale)

    info = race(make, sets(lambda training, number: setattr(training.model.body[0].weight, "scale", number / 3)))
    assert info.cache_info().hits == 0


def test_a_number_that_the_step_moves_as_well() -> None:
    class Counts:
        def __init__(self) -> None:
            self.seen = 0

    kept: list[Counts] = []

    def make(training: Training) -> Step:
        counts = Counts()
        kept.append(counts)

        def step(x: Tensor) -> Tensor:
            counts.seen += 1
            return training.update(training.model(x).mean() * counts.seen)

        return step

    def give(training: Training, number: int) -> tuple[Any, ...]:
        if number % 3 == 0:
            kept[-1].seen = 10 * number
        return ()

    race(make, give)
    assert kept[0].seen == kept[1].seen


def test_compiled_by_inductor() -> None:
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
    original = counters.identity
    monkeypatch.setattr("wholestep.capture.reach.step_context.identity", lambda one: asked.append(one) or original(one))
    race(weighted, lambda training, number: (0.5,))
    assert not asked


def test_the_next_process_traces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("WHOLESTEP_CACHE", "1")
    first, second = (race(switched, numbers).cache_info() for _ in range(2))
    assert (first.traces, first.loaded) == (3, 0)
    assert (second.traces, second.loaded) == (0, 3)
