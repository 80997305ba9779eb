"""What a step sets outside of Python's objects it sets in every call, also where the user has set something else."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.behaviour.hidden_state.settings import SETTINGS, Setting


@pytest.fixture
def setting(request: pytest.FixtureRequest) -> Iterator[Setting]:
    """The setting of that name, which is afterwards as it was."""
    found = SETTINGS[request.param]
    try:
        before = found.get()
    except (AttributeError, KeyError):
        before = found.other
    random_state = torch.get_rng_state()
    with warnings.catch_warnings():
        yield found
        try:
            found.set(before)
        except (TypeError, ValueError, RuntimeError):
            found.set(found.other)
    torch.set_rng_state(random_state)


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize("starts", ["other", "own"])
@pytest.mark.parametrize("setting", SETTINGS, indirect=True)
def test_a_setting_is_set_again(setting: Setting, starts: str) -> None:
    def run(compiled: Callable[..., Any]) -> list[Any]:
        model = nn.Linear(3, 2)

        def step(x: Tensor) -> Tensor:
            setting.set(setting.own)
            return model(x).sum().detach()

        x = torch.ones(2, 3)
        made, found = compiled(step), []
        setting.set(getattr(setting, starts))
        for call in range(6):
            if call in (2, 3, 5):
                setting.set(setting.other)
            made(x)
            found.append(setting.get())
        return found

    eager = run(lambda step: step)
    assert run(lambda step: ws.compile(step, backend="eager")) == eager
    assert eager.count(eager[0]) == len(eager)
