"""Text and numbers that can be no input of a graph stay constants of their trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

import wholestep as ws
from tests.unit.capture.changing_numbers import (
    CALLS,
    Net,
    Step,
    Training,
    batch,
    numbers,
    sets,
    train_both,
    weighted,
)
from wholestep.errors import RetraceLimitError


def named(training: Training) -> Step:
    return lambda x, names: training.update(training.model(x).mean())


def names_of(training: Training, number: int) -> tuple[Any, ...]:
    return ({"files": [f"{number}-{row}.png" for row in range(3)], "text": f"caption {number}"},)


def test_text_that_nobody_looks_at_may_be_any(kind: str, captures: list[int]) -> None:
    step = train_both(named, names_of)
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

    step = train_both(make, lambda training, number: (str(number),))
    assert step.cache_info().traces + step.cache_info().loaded == CALLS


def test_text_that_is_returned_stays_a_constant() -> None:
    def make(training: Training) -> Step:
        return lambda x, name: {"loss": training.update(training.model(x).mean()), "name": name}

    train_both(make, lambda training, number: (f"name {number}",))


def test_a_mode_by_name_is_a_trace_per_mode() -> None:
    def make(training: Training) -> Step:
        return lambda x, mode: training.update(F.gelu(training.model(x), approximate=mode).mean())

    info = train_both(make, lambda training, number: ("none" if number % 3 else "tanh",)).cache_info()
    assert info.traces + info.loaded == 2


def test_a_number_among_many_texts_is_an_input(captures: list[int]) -> None:
    def make(training: Training) -> Step:
        return lambda x, names, beta: training.update(training.model(x).mean() * beta * len(names[1]))

    train_both(make, lambda training, number: ([f"{number}" * n for n in range(1, 5)], number / 3))
    assert [one for one in captures if one][:4] == [5, 1, 5, 1]  # all; the number; with all texts; the number


TYPES: dict[str, Callable[[Any], float]] = {
    "isinstance": lambda number: number if isinstance(number, int) else 100,
    "type": lambda number: number if type(number) is int else 100,
}


@pytest.mark.parametrize("how", TYPES)
def test_a_number_that_is_asked_for_its_type_is_an_input(how: str) -> None:
    def make(training: Training) -> Step:
        return lambda x, number: training.update(training.model(x).mean() * TYPES[how](number))

    assert train_both(make, numbers).cache_info().hits > 0


def test_a_symbol_that_is_taken_for_no_number_is_none() -> None:
    def scale(number: Any) -> Any:
        return 100 if hasattr(number, "node") else number

    def make(training: Training) -> Step:
        return lambda x, number: training.update(training.model(x).mean() * scale(number))

    assert train_both(make, numbers).cache_info().hits == 0


def test_a_number_of_another_type_is_another_trace(kind: str) -> None:
    given = [1, 2, 0.5, 3, True, 4, 0.25]
    step = train_both(weighted, lambda training, number: (given[number],))
    assert any("True" in reason or "bool" in reason for reason in step.cache_info().reasons)
    assert step.cache_info().hits >= 2  # 3 and 4


def test_an_int_beyond_a_word_stays_a_constant() -> None:
    def make(training: Training) -> Step:
        return lambda x, number: training.update(training.model(x).mean() * (number % 7))

    info = train_both(make, lambda training, number: (2**70 + number,)).cache_info()
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
    step = train_both(make, numbers)
    info = step.cache_info()
    assert info.traces + info.loaded == CALLS
    assert all("argument 1 was" in reason for reason in info.reasons)
    (told,) = step._stages.retraces._constant.values()
    assert told.startswith("Argument 1 can be no input of the graph: ")
    assert why in told


def test_what_can_be_no_input_is_found_out_once(captures: list[int]) -> None:
    train_both(STAY["a shape"][0], numbers)
    assert [one for one in captures if one] == [1]


def test_a_number_that_is_only_read_stays_the_object_it_is() -> None:
    """Python would tell of a write, and all that its object holds would be compared at the next call."""
    model = Net()
    step: Any = ws.compile(lambda x: model(x).detach().sum(), backend="eager")
    for number in range(3):
        model.temperature = value = 1.5 + number
        step(batch(0))
        assert model.temperature is value


def test_the_limit_says_what_could_be_no_input() -> None:
    model = Net()

    @ws.compile(backend="eager", max_retraces=2, fullgraph=True)
    def step(x: Tensor, size: int) -> Tensor:
        return model(x[:size]).detach().sum()

    for size in (1, 2, 3):
        step(batch(0), size)
    with pytest.raises(RetraceLimitError, match=r"Argument 1 can be no input of the graph: The shape of a tensor"):
        step(batch(0), 4)


def test_the_number_of_a_replaced_object_is_a_constant_again() -> None:
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

    train_both(make, give)


def test_a_number_on_a_parameter_is_a_constant() -> None:
    """While the step is traced a parameter has other attributes."""

    def make(training: Training) -> Step:
        weight: Any = training.model.body[0].weight
        return lambda x: training.update(training.model(x).mean() * weight.scale)

    info = train_both(make, sets(lambda training, number: setattr(training.model.body[0].weight, "scale", number / 3)))
    assert info.cache_info().hits == 0
