"""Text of what a graph computes is refused, in the code of the user alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.capture.steps import captured
from wholestep.errors import CaptureError

HERE = Path(__file__).name

TEXTS: dict[str, Callable[[Tensor], Any]] = {
    "format of a tensor": lambda x: f"{x.sum():.2f}",
    "str of a tensor": lambda x: str(x),
    "repr of a tensor": lambda x: repr(x),
    "percent": lambda x: "%s" % x.sum(),  # noqa: UP031
    "a list of tensors": lambda x: str([x]),
    "a number of the graph": lambda x: f"{x.sum().item():.3f}",
    "str of a number": lambda x: str(x.sum().item()),
}


@pytest.mark.parametrize("what", TEXTS)
def test_text_is_refused_at_its_line(what: str) -> None:
    make = TEXTS[what]

    def step(x: Tensor) -> Tensor:
        make(x)
        return x * 2

    with pytest.raises(CaptureError, match="makes text of a value that its graph computes") as raised:
        captured(step, torch.ones(3))
    assert f"{HERE}:{make.__code__.co_firstlineno}" in str(raised.value)


def test_text_is_refused_where_its_error_is_caught() -> None:
    """Eager code would not have come to the handler."""

    def step(x: Tensor) -> Tensor:
        try:
            str(x)
        except Exception:
            return x * 3
        return x * 2

    with pytest.raises(CaptureError, match="makes text of a value"):
        captured(step, torch.ones(3))


def test_text_of_what_is_known_is_made() -> None:
    def step(x: Tensor) -> tuple[Tensor, str]:
        return x * 2, f"{x.dtype} {tuple(x.shape)} {len(x):03d} {x.device}"

    captured(step, torch.ones(3))
    assert str(torch.ones(1)) == "tensor([1.])", "what is replaced while capturing is back"
