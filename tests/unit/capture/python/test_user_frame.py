"""Errors met while tracing name the user's line and say what to do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.capture.steps import captured
from wholestep.capture.python import user_frame
from wholestep.errors import CaptureError, ConfigError

HERE = Path(__file__).name


def first_line(function: Callable[..., Any]) -> int:
    return function.__code__.co_firstlineno


def failing_in_torch() -> None:
    nn.functional.linear(torch.ones(2), torch.ones(3, 3))


def test_the_deepest_line_of_the_user_is_named() -> None:
    with pytest.raises(RuntimeError) as raised:
        failing_in_torch()
    line = user_frame.user_line(raised.value.__traceback__)
    assert f"{HERE}:{first_line(failing_in_torch) + 1} in failing_in_torch" in line
    assert line.endswith("nn.functional.linear(torch.ones(2), torch.ones(3, 3))")


def test_no_line_is_said_to_be_unknown() -> None:
    assert user_frame.user_line(None) == "an unknown line"


def test_the_running_line_of_the_user_is_found() -> None:
    seen: list[str] = []

    class Spy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(user_frame.current_line())
            return x

    nn.Sequential(Spy())(torch.ones(1))
    assert seen == [f"{HERE}:{first_line(Spy.forward) + 1}"]


def test_a_step_is_placed_by_name_file_and_first_line() -> None:
    @functools.wraps(failing_in_torch)
    def wrapped() -> None:
        failing_in_torch()

    wanted = f"failing_in_torch, {__file__}:{first_line(failing_in_torch)}"
    assert user_frame.defined_at(failing_in_torch) == wanted
    assert user_frame.defined_at(wrapped) == wanted
    assert user_frame.defined_at(functools.partial(failing_in_torch)).endswith(f":{first_line(failing_in_torch)}")
    assert user_frame.defined_at(object()) == "object"


def test_our_errors_get_the_place_of_the_step_once() -> None:
    for text, added in (("no line", True), (f"bad at {__file__}:3", False)):
        with pytest.raises(ConfigError) as raised, user_frame.naming(failing_in_torch):
            raise ConfigError(text)
        assert ("The step is failing_in_torch" in str(raised.value)) is added
    with pytest.raises(KeyError, match=r"^'left alone'$"), user_frame.naming(failing_in_torch):
        raise KeyError("left alone")


def test_our_errors_are_not_wrapped() -> None:
    error = ConfigError("said already")
    assert user_frame.explain(error) is error


def test_addresses_in_libraries_are_no_reason() -> None:
    error = RuntimeError("Cannot call numel()\nException raised from numel at impl.cpp:40\nframe #0: c10::Error + 0x9d")
    text = str(user_frame.explain(error))
    assert text.endswith("RuntimeError: Cannot call numel()")


@torch.library.custom_op("wholestep_unit::no_fake", mutates_args=())
def no_fake(x: Tensor) -> Tensor:
    return x.clone()


def steps() -> dict[str, tuple[Callable[[Tensor], Any], str]]:
    return {
        "branch": (lambda x: 1 if x.sum() > 0 else 2, "value of a tensor decides"),
        "float": (lambda x: float(x.sum()), "value of a tensor decides"),
        "numpy": (lambda x: x.numpy(), "turned into numpy"),
        "fake": (lambda x: no_fake(x), "no fake kernel"),
        "own": (lambda x: {}["missing"], "KeyError"),
    }


@pytest.mark.parametrize("name", steps())
def test_each_kind_of_error_is_explained_at_its_line(name: str) -> None:
    step, said = steps()[name]
    with pytest.raises(CaptureError, match=said) as raised:
        captured(step, torch.ones(3))
    assert f"{HERE}:{first_line(step)} in " in str(raised.value)
    assert raised.value.__cause__ is not None
