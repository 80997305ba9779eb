"""The usual call takes a shortcut through native code: the same results, the same counts, and only where it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import wholestep as ws
from wholestep.api.compiled_step import CompiledStep
from wholestep.capture.guards.state_guards import ContainerGuard
from wholestep.capture.native import build
from wholestep.capture.python.tracing_thread import capture_flag
from wholestep.ir.program import Stage

pytestmark = pytest.mark.skipif(build.wait() != "", reason="there are no native guards")


def hits(step: CompiledStep) -> int:
    """Calls that took a shortcut."""
    return step._stats.fast_hits


def doubled(x: Tensor) -> Tensor:
    return 2 * x


def nothing(x: Tensor) -> None:
    x + 1


def nested(x: Tensor) -> dict[str, Any]:
    return {"sum": x.sum(), "both": [x + 1, 3], "name": "n"}


@pytest.mark.parametrize("plain", [doubled, nothing, nested])
def test_every_kind_of_result_is_that_of_eager_code(plain: Callable[[Tensor], Any]) -> None:
    step = ws.compile(plain, backend="eager")
    for number in range(4):
        x = torch.full((2,), float(number))
        assert repr(step(x)) == repr(plain(x))
    assert hits(step) == 3
    assert (step.cache_info().traces, step.cache_info().hits) == (1, 3)


def test_signatures_in_turn_are_counted_once_each() -> None:
    step = ws.compile(doubled, backend="eager", dynamic=False)
    for number, rows in enumerate((2, 2, 3, 3, 3, 2, 2, 3), 1):
        assert torch.equal(step(torch.ones(rows)), torch.full((rows,), 2.0))
        assert step.program().inputs[0].shape == (rows,), "the last signature used comes first"
        assert step._stages.rendezvous.call().endswith(f", call {number}")
    assert (step.cache_info().traces, step.cache_info().hits) == (2, 6)
    assert hits(step) == 6, "all but the captures: the other signature than before is found by its key"


def test_other_sizes_take_the_shortcut_where_conditions_and_strides_hold() -> None:
    def scaled(x: Tensor) -> Tensor:
        return 3 * x if x.shape[0] > 8 else 2 * x

    step = ws.compile(scaled, backend="eager", fullgraph=True)
    for rows in (2, 3, 4, 7, 8):
        assert torch.equal(step(torch.ones(rows, 2)), torch.full((rows, 2), 2.0))
    assert (step.cache_info().traces, hits(step)) == (2, 3)
    assert torch.equal(step(torch.ones(9, 2)), torch.full((9, 2), 3.0)), "the condition is another one"
    assert torch.equal(step(torch.ones(2, 10).t()), torch.full((10, 2), 3.0)), "so are the strides"
    assert torch.equal(step(torch.ones(1, 2)), torch.full((1, 2), 2.0)), "one row broadcasts"
    assert torch.equal(step(torch.ones(4, 3)), torch.full((4, 3), 2.0)), "this dim has not moved"
    assert (step.cache_info().traces, hits(step)) == (6, 3)


def test_arguments_by_name_and_in_containers_take_the_shortcut() -> None:
    def summed(parts: list[Tensor], *, scale: float, more: dict[str, Tensor]) -> Tensor:
        return scale * (parts[0] + parts[1] + more["x"])

    step = ws.compile(summed, backend="eager", fullgraph=True)
    x = torch.ones(2)
    for _ in range(3):
        assert torch.equal(step([x, x + 1], scale=2.0, more={"x": x}), torch.full((2,), 8.0))
    assert hits(step) == 2
    assert torch.equal(step([x, x + 1], scale=3.0, more={"x": x}), torch.full((2,), 12.0))
    assert torch.equal(step([x, x], scale=3.0, more={"x": x}), torch.full((2,), 9.0)), "the same tensor twice"
    with pytest.raises(ws.CaptureError, match="positional argument"):
        step([x, x + 1], 2.0, more={"x": x})
    assert hits(step) == 2


def test_a_step_inside_of_another_one_is_captured_with_it() -> None:
    """Neither arguments nor state are fake here."""
    inner = ws.compile(lambda: 3 * torch.ones(2), backend="eager")
    for _ in range(3):
        inner()
    assert hits(inner) == 2
    outer = ws.compile(lambda x: x + inner(), backend="eager")
    for _ in range(3):
        assert torch.equal(outer(torch.ones(2)), torch.full((2,), 4.0))
    assert hits(inner) == 2
    assert any(node.target == torch.ops.aten.mul.Tensor for node in outer.program(Stage.CAPTURED).graph.nodes)


def test_nothing_is_short_while_a_capture_runs() -> None:
    step = ws.compile(doubled, backend="eager")
    for _ in range(2):
        step(torch.ones(2))
    with capture_flag():
        assert torch.equal(step(torch.ones(2)), torch.full((2,), 2.0))
    assert step.cache_info().hits == 1, "the function itself ran"


def test_an_error_is_that_of_the_step_and_the_next_call_goes_on() -> None:
    table = torch.arange(4.0)

    @ws.compile(backend="eager")
    def looked_up(index: Tensor) -> Tensor:
        return table[index].sum()

    good, bad = torch.tensor([1, 2]), torch.tensor([1, 9])
    for _ in range(2):
        assert looked_up(good) == 3
    with pytest.raises(IndexError, match=r"out of (bounds|range)"):
        looked_up(bad)
    assert torch.is_grad_enabled()
    assert looked_up(good) == 3
    assert hits(looked_up) == 3


class Table(dict[str, float]):
    """Whose version number says nothing, as far as anybody knows: the native guard leaves it to the full comparison."""


def test_what_is_compared_at_every_call_is_compared() -> None:
    table = Table(factor=2.0)
    step = ws.compile(lambda x: x * table["factor"], backend="eager")
    for _ in range(3):
        assert step(torch.ones(1)) == 2
    assert hits(step) == 2
    table["factor"] = 3.0
    assert step(torch.ones(1)) == 3
    assert step.cache_info().traces == 2


def test_measured_calls_are_measured() -> None:
    step = ws.compile(doubled, backend="eager")
    x = torch.ones(2)
    for _ in range(3):
        step(x)
    before = hits(step)
    step.measure(2)
    for _ in range(3):
        step(x)
    assert hits(step) == before
    assert step._last().executable.measured is not None
    for _ in range(3):
        step(x)
    assert hits(step) == before + 3, "the last measured call finds the way again"
    assert step.cache_info().hits == 8


def test_an_error_while_comparing_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    factors = [1.0]
    step = ws.compile(lambda x: x * factors[0], backend="eager")
    for _ in range(3):
        step(torch.ones(2))
    monkeypatch.setattr(ContainerGuard, "why_not", lambda self, call: 1 / 0)
    factors[0] = 2.0
    with pytest.raises(ZeroDivisionError):
        step(torch.ones(2))
    monkeypatch.undo()
    assert torch.equal(step(torch.ones(2)), torch.full((2,), 2.0))


def test_wrong_use_of_the_native_types_is_a_type_error() -> None:
    step = ws.compile(doubled, backend="eager")
    for _ in range(2):
        step(torch.ones(2))
    shortcut: Any = step._fast_call
    for args in ((), (1,), ((), {}, 1)):
        with pytest.raises(TypeError, match="args: tuple, kwargs: dict"):
            shortcut(*args)
    assert shortcut([torch.ones(2)], {}) is shortcut
    module = build.module()
    assert module is not None
    with pytest.raises(TypeError):
        module.FastCall(1, 2, 3, 4, 5, 6, 7, 8)
