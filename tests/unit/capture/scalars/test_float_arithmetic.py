"""Remainders and whole quotients of traced floats are computed at every call; torch's symbols take floats for whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import wholestep as ws
from tests.harness.training import backward_and_step

EXPRESSIONS: dict[str, Callable[[Any], Any]] = {
    "x % 1.0": lambda x: x % 1.0,
    "x % 0.3": lambda x: x % 0.3,
    "-x % 0.3": lambda x: -x % 0.3,
    "x // 1.0": lambda x: x // 1.0,
    "x // -0.3": lambda x: x // -0.3,
    "5.5 % x": lambda x: 5.5 % (x + 3),
    "5.5 // x": lambda x: 5.5 // (x + 3),
    "x % x": lambda x: (x + 0.25) % (x * 0.1 + 3),
    "x ** 0.5": lambda x: x**0.5,
    "negative ** 2": lambda x: (x - 9.0) ** 2,
    "negative ** 3.0": lambda x: (x - 9.0) ** 3.0,
    "negative ** 0.5": lambda x: (x - 9.0) ** 0.5,  # a complex number
    "2 ** x": lambda x: 2**x,
    "x ** x": lambda x: (x + 3) ** x,
}


def trained(decorate: Callable[[Any], Any], decide: Callable[[Any], Any], read: str) -> tuple[Any, Any]:
    """What `decide` gives of a number that the graph computes, or of a rate, in five calls, and the compiled step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    opt, found = torch.optim.SGD(model.parameters(), lr=0.7), []

    @decorate
    def step(x: torch.Tensor) -> Any:
        loss = model(x).square().mean()
        decided = decide(loss.item() if read == "loss" else opt.param_groups[0]["lr"])
        backward_and_step(loss, opt)
        return decided

    for call in range(5):
        found.append(step(torch.randn(4, 3, generator=torch.Generator().manual_seed(call))))
        opt.param_groups[0]["lr"] *= 0.8
    return found, step


@pytest.mark.parametrize("read", ["loss", "rate"])
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_it_is_computed_at_every_call(name: str, read: str) -> None:
    wanted, _ = trained(lambda step: step, EXPRESSIONS[name], read)
    found, step = trained(lambda step: ws.compile(step, backend="eager", fullgraph=True), EXPRESSIONS[name], read)
    assert found == wanted
    assert len(set(found)) > 1 or "//" in name
    assert step.cache_info().traces == 1


def test_a_branch_on_one_of_a_rate_is_asked_at_every_call() -> None:
    decide = lambda x: "large" if x % 0.3 > 0.15 else "small"  # noqa: E731
    wanted, _ = trained(lambda step: step, decide, "rate")
    found, step = trained(lambda step: ws.compile(step, backend="eager", fullgraph=True), decide, "rate")
    assert found == wanted
    assert set(found) == {"large", "small"}
    assert step.cache_info().traces == 2


@pytest.mark.parametrize(
    "decide",
    [lambda x: "large" if x % 1.0 > 0.5 else "small", lambda x: math.frexp(float(x % 1.0))],
    ids=["branch", "float"],
)
def test_python_may_not_decide_by_one_that_the_graph_computes(decide: Callable[[Any], Any]) -> None:
    with pytest.raises(ws.CaptureError, match="the value of a tensor decides what Python does"):
        trained(lambda step: ws.compile(step, backend="eager", fullgraph=True), decide, "loss")
