"""Overrides on one process: which modules are asked about, what stands in, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.spmd.steps import Keeps, train_step
from wholestep.errors import ConfigError
from wholestep.spmd import compile


class Hole(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("nothing to trace")


def fills(make: Callable[[nn.Module], Any]) -> Keeps:
    return Keeps(lambda module: make(module) if isinstance(module, Hole) else module)


def started(*overrides: Keeps) -> tuple[nn.Module, Any, Callable[..., Any]]:
    """A model with a hole, a compiled step with these overrides, and a call of it."""
    torch.manual_seed(0)
    mod = nn.Sequential(nn.Linear(3, 3), nn.Sequential(Hole(), nn.Linear(3, 3)))
    opt, compiled = torch.optim.SGD(mod.parameters(), lr=0.1), compile(module_override=overrides)(train_step)
    return mod, compiled, lambda rows=2: compiled(mod, opt, torch.ones(rows, 3))


def test_every_submodule_is_asked_about_and_the_model_is_left_as_it_was() -> None:
    override = fills(lambda hole: nn.Identity())
    mod, compiled, call = started(override)
    call()
    assert override.asked == ["0", "1", "1.0", "1.1"]
    assert isinstance(mod[1][0], Hole)
    graph = compiled._compiled_obj.gm
    call()
    assert compiled._compiled_obj.gm is graph, "the guards hold with the originals in place"


def test_a_change_of_the_model_is_still_seen() -> None:
    mod, compiled, call = started(fills(lambda hole: nn.Identity()))
    call()
    graph = compiled._compiled_obj.gm
    mod[1][0] = nn.ReLU()
    call()
    assert compiled._compiled_obj.gm is not graph
    assert "relu" in compiled._compiled_obj.gm.code


def test_a_replacement_keeps_its_parameters_over_retraces() -> None:
    made: list[nn.Module] = []
    *_, call = started(fills(lambda hole: (made.append(nn.Linear(3, 3)), made[-1])[1]))
    for rows in (2, 4):
        call(rows)
    assert len(made) == 1
    assert made[0].weight.grad is None


def test_overrides_see_what_the_one_before_chose() -> None:
    second = Keeps(lambda module: nn.Tanh() if isinstance(module, nn.Identity) else module)
    _, compiled, call = started(fills(lambda hole: nn.Identity()), second)
    call()
    assert "tanh" in compiled._compiled_obj.gm.code


def test_the_model_is_left_as_it_was_when_the_capture_fails() -> None:
    mod, _, call = started(fills(lambda hole: Hole()))
    with pytest.raises(Exception, match="nothing to trace"):
        call()
    assert isinstance(mod[1][0], Hole)


def test_a_replacement_that_is_no_module() -> None:
    *_, call = started(fills(lambda hole: torch.tanh))
    with pytest.raises(ConfigError, match=r"replacement\('1.0'"):
        call()
