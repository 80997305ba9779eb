"""Comparisons of uniform draws whose answer is certain: Python is told, and the draws stay in the graph."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import wholestep as ws
from tests.unit.capture.steps import branch_guard, calls, captured, differing, program_of, train
from wholestep.errors import CaptureError
from wholestep.passes.rewrites.dead_code import eliminate_dead_code

HERE = Path(__file__).name

Ask = Callable[[Tensor, float], Any]
"""Compares numbers that were drawn with a number."""


class Skipping(nn.Module):
    """Layers with dropout, each of them skipped with a probability, as transformers write it."""

    def __init__(self, probability: float, draw: Callable[[], Any] = lambda: torch.rand([])) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.first = nn.Linear(4, 4)
        self.probability, self.draw = probability, draw

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            if self.training and self.draw() < self.probability:
                continue
            x = functional.dropout(layer(x), 0.5)
        return x


def trained(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


DRAWS: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.rand([]),
    "one element": lambda: torch.rand(1),
    "number": lambda: torch.rand(1).item(),
    "one of several": lambda: torch.rand(2, 3)[1, 2],
    "the last": lambda: torch.rand(3).view(-1).detach()[-1:].squeeze(0),
    "like another": lambda: torch.rand_like(torch.ones(())),
    "unpacked": lambda: max(torch.rand(2).unbind(), key=id),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_layers_that_are_never_or_always_skipped_are_traced_once(probability: float, draw: Callable[[], Any]) -> None:
    """Masks of dropout that are drawn after the comparisons, and the generator itself, are those of eager code."""
    eager, ours = trained(Skipping(probability, draw)), trained(Skipping(probability, draw))
    ours[0].load_state_dict(eager[0].state_dict())
    step, x = ws.compile(train, backend="eager"), torch.randn(5, 4)
    for number in range(3):
        torch.manual_seed(number)
        want, after = train(*eager, x), torch.get_rng_state()
        torch.manual_seed(number)
        assert torch.equal(step(*ours, x), want)
        assert torch.equal(torch.get_rng_state(), after)
        assert differing(eager[0], ours[0]) == []
    info = step.cache_info()
    assert (info.traces, info.hits) == (1, 2)


def test_nothing_is_checked_in_later_calls() -> None:
    assert branch_guard(captured(Skipping(0.0).forward, torch.randn(2, 4)).guards) is None


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_the_draws_alone_stay_in_the_graph(backend: str) -> None:
    model = Skipping(0.0)
    step = ws.compile(lambda x: model(x).detach(), backend=backend)
    step(torch.randn(2, 4))
    assert [node.target for node in calls(step.program())].count(torch.ops.aten.rand.default) == 3
    names = {str(node.target) for node in calls(step.program())}
    assert not names & {"aten.lt.Scalar", "aten._local_scalar_dense.default", "<built-in function ne>"}


def test_a_draw_on_a_gpu_is_not_waited_for() -> None:
    program = program_of(Skipping(0.0, lambda: torch.rand([], device="cuda")).forward, torch.randn(2, 4))
    eliminate_dead_code(program)
    names = [str(node.target) for node in calls(program)]
    assert names.count("aten.rand.default") == 3
    assert not set(names) & {"aten.lt.Scalar", "aten._local_scalar_dense.default", "<built-in function ne>"}


def test_a_probability_that_is_raised_is_seen() -> None:
    model = Skipping(0.0)
    step = ws.compile(lambda x: model(x).detach(), backend="eager", fullgraph=True)
    step(torch.randn(2, 4))
    model.probability = 1.0
    x = torch.randn(2, 4)
    assert torch.equal(step(x), model.first(x))
    model.probability = 0.5
    state = torch.get_rng_state()
    with pytest.raises(CaptureError, match="the value of a tensor decides"):
        step(x)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_chance_is_refused_with_what_helps(draw: Callable[[], Any]) -> None:
    line = Skipping.forward.__code__.co_firstlineno + 3
    with pytest.raises(CaptureError, match=f"{HERE}:{line}") as raised:
        ws.compile(Skipping(0.1, draw).forward, backend="eager", fullgraph=True)(torch.randn(2, 4))
    assert "the value of a tensor decides" in str(raised.value)
    assert "set it to 0 (layerdrop" in str(raised.value)


def test_data_is_not_told_of_probabilities() -> None:
    with pytest.raises(CaptureError) as raised:
        ws.compile(lambda x: x if x.sum() < 0.0 else -x, backend="eager", fullgraph=True)(torch.randn(3))
    assert "layerdrop" not in str(raised.value)


NUMBERS = (-math.inf, -1.0, -1e-3, -1e-12, -0.0, 0, 1e-12, 0.1, 0.5, 0.999, 1 - 1e-12, 1, 1 + 1e-12, 2.5, math.inf)
COMPARISONS = (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)
UNKNOWN = "unknown"

WANTED: dict[str, tuple[list[Any], list[Any]]] = {
    # what is asked -> the answers at -1, 0, 0.5, 1, 2, of a draw on the left and of one on the right
    "lt": ([False, False, UNKNOWN, True, True], [True, UNKNOWN, UNKNOWN, False, False]),
    "le": ([False, UNKNOWN, UNKNOWN, True, True], [True, True, UNKNOWN, False, False]),
    "gt": ([True, UNKNOWN, UNKNOWN, False, False], [False, False, UNKNOWN, True, True]),
    "ge": ([True, True, UNKNOWN, False, False], [False, UNKNOWN, UNKNOWN, True, True]),
    "eq": ([False, UNKNOWN, UNKNOWN, False, False], [False, UNKNOWN, UNKNOWN, False, False]),
    "ne": ([True, UNKNOWN, UNKNOWN, True, True], [True, UNKNOWN, UNKNOWN, True, True]),
}


def answers(ask: Callable[[Any], Any], draw: Callable[[], Any]) -> Any:
    """What Python sees of a comparison while it is captured."""
    try:
        return bool(ws.compile(lambda x: x + 1 if ask(draw()) else x, backend="eager", fullgraph=True)(torch.zeros(1)))
    except CaptureError as error:
        return UNKNOWN if "the value of a tensor decides" in str(error) else str(error)


@pytest.mark.parametrize("name", WANTED)
@pytest.mark.parametrize("kind", ["tensor", "number"])
def test_an_answer_is_known_where_it_is_certain(name: str, kind: str) -> None:
    compare = getattr(operator, name)
    left, right = WANTED[name]
    for number, on_left, on_right in zip((-1.0, 0.0, 0.5, 1, 2), left, right, strict=True):
        assert answers(lambda draw, n=number: compare(draw, n), DRAWS[kind]) == on_left
        assert answers(lambda draw, n=number: compare(n, draw), DRAWS[kind]) == on_right


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_no_draw_contradicts_an_answer(dtype: torch.dtype) -> None:
    """The least and the greatest number of a type that can be drawn, and numbers that a comparison rounds."""
    from wholestep.capture.scalars.random_ranges import _ANSWERS

    greatest = torch.nextafter(torch.ones((), dtype=dtype), torch.zeros((), dtype=dtype))
    for compare in COMPARISONS:
        for number in NUMBERS:
            answer = _ANSWERS[compare](number)
            for draw in (torch.zeros((), dtype=dtype), greatest):
                assert answer in (None, bool(compare(draw, number))), (compare, number, draw)
    assert all(_ANSWERS[compare](math.nan) is None for compare in COMPARISONS)


CHANGED: dict[str, Callable[[], Tensor]] = {
    "multiplied": lambda: torch.rand([]).mul_(5),
    "another number": lambda: torch.rand([]) * 5,
    "another kind of draw": lambda: torch.randn([]),
    "written over": lambda: _written_through(lambda draw: draw.view(1)),
    "written over as an item": lambda: _written_through(lambda draw: draw.view(1, 1)[0]),
    "negated": lambda: -torch.rand([]),
    "other bits": lambda: torch.rand([]).view(torch.int32),
    "rounded": lambda: torch.rand([]).to(torch.float16),
    "summed": lambda: torch.rand(3).sum(),
}


def _written_through(view: Callable[[Tensor], Tensor]) -> Tensor:
    draw = torch.rand([])
    view(draw).add_(3)
    return draw


@pytest.mark.parametrize("draw", CHANGED.values(), ids=CHANGED)
def test_what_is_no_draw_any_more_is_refused(draw: Callable[[], Tensor]) -> None:
    assert answers(lambda drawn: drawn < 1, draw) == UNKNOWN


def test_a_draw_next_to_a_count_is_no_condition() -> None:
    """Beside a number of the host the answer belongs to a condition, for which nothing is drawn."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.tensor(0))
            self.count: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            late = (self.count > 2) & (torch.rand([]) < 1.0)
            return functional.dropout(x, 0.5) * (2 if late else 3)

    eager, ours = Both(), Both()
    step, x = ws.compile(ours.forward, backend="eager"), torch.ones(20)
    for number in range(5):
        torch.manual_seed(number)
        want, after = eager(x), torch.get_rng_state()
        torch.manual_seed(number)
        assert torch.equal(step(x), want)
        assert torch.equal(torch.get_rng_state(), after)
    assert step.cache_info().traces == 2


def test_an_answer_that_is_written_over_is_asked_again() -> None:
    class Overwritten(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.tensor(0))
            self.count: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            skip = torch.rand([]) < 0.0
            skip.view(1).logical_or_(self.count > 2)
            return x * (2 if skip else 3)

    eager, ours = Overwritten(), Overwritten()
    step, x = ws.compile(ours.forward, backend="eager"), torch.ones(2)
    for _ in range(5):
        assert torch.equal(step(x), eager(x))
    assert step.cache_info().traces == 2
