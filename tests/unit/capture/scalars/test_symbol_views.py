"""Symbols count as numbers in code outside of torch; text of what a graph computes is refused there."""

from __future__ import annotations

import numbers
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import wholestep as ws
from tests.unit.capture.steps import captured
from wholestep.capture.scalars.symbol_views import symbols_are_numbers
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


def _matches(number: Any) -> bool:
    match number:
        case int() | float():
            return True
        case _:
            return False


QUESTIONS: dict[str, Callable[[Any], bool]] = {
    "isinstance": lambda number: isinstance(number, (int, float)),
    "an abstract class": lambda number: isinstance(number, numbers.Real),
    "a pattern": _matches,
    "its class": lambda number: number.__class__ in (int, float),
    "its type": lambda number: type(number) in (int, float) and type(number)(2) == 2,
    "a library of Python asks": lambda number: isinstance(number, numbers.Number) and not isinstance(number, Tensor),
}


@pytest.mark.parametrize("asks", QUESTIONS.values(), ids=QUESTIONS)
def test_a_size_that_moves_is_a_number(asks: Callable[[Any], bool]) -> None:
    def step(x: Tensor) -> Tensor:
        return x * (2.0 if asks(x.shape[0]) else 3.0)

    compiled = ws.compile(step, dynamic=True, fullgraph=True)
    for rows in (4, 6, 9):
        x = torch.randn(rows, 3)
        assert torch.equal(compiled(x), x * 2.0)
    assert compiled.cache_info().traces == 1


def test_the_length_of_a_tensor_is_a_size_that_moves() -> None:
    def step(x: Tensor, parts: list[Tensor]) -> tuple[Tensor, int]:
        places = torch.arange(len(x))[:, None]
        return (x * places).sum() / len(x) + len(parts) + len(x.shape), len(x)

    compiled = ws.compile(step, dynamic=True, fullgraph=True)
    for rows in (4, 6, 9):
        x = torch.randn(rows, 3)
        wanted, found = step(x, [x, x]), compiled(x, [x, x])
        assert torch.equal(found[0], wanted[0])
        assert (found[1], type(found[1])) == (rows, int)
    assert compiled.cache_info().traces == 1


def test_a_tensor_without_dims_has_no_length() -> None:
    with pytest.raises(CaptureError, match=r"len\(\) of a 0-d tensor"):
        captured(lambda x: x * len(x.sum()), torch.ones(3))


def test_text_of_a_size_makes_that_dim_a_constant_and_no_other() -> None:
    def step(x: Tensor) -> Tensor:
        return x * {"rows 4": 2.0, "rows 6": 3.0}[f"rows {x.shape[0]:d}"]

    compiled = ws.compile(step, dynamic=True, fullgraph=True)
    for rows, columns in ((4, 3), (6, 5), (4, 7), (6, 9)):
        x = torch.randn(rows, columns)
        assert torch.equal(compiled(x), step(x))
    assert compiled.cache_info().traces == 2
    (why,) = compiled.explain().sizes.constant
    assert why.startswith("Dim 0 of argument 0 is a constant")


@pytest.mark.parametrize("asks", QUESTIONS.values(), ids=QUESTIONS)
def test_a_rate_that_moves_is_a_number(asks: Callable[[Any], bool]) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    opt = torch.optim.SGD([weight], lr=0.5)

    def step(x: Tensor) -> Tensor:
        rate = opt.param_groups[0]["lr"]
        (weight * x * (2.0 if asks(rate) else 3.0)).sum().backward()
        opt.step()
        opt.zero_grad()
        return weight.detach().clone()

    compiled = ws.compile(step, fullgraph=True)
    wanted = torch.ones(3)
    for rate in (0.5, 0.25, 0.125):
        opt.param_groups[0]["lr"] = rate
        wanted -= 2.0 * rate
        assert torch.equal(compiled(torch.ones(3)), wanted)
    assert compiled.cache_info().traces == 1


def test_torch_and_other_threads_tell_a_symbol_from_a_number() -> None:
    symbol, found, scope = torch.SymInt.__new__(torch.SymInt), [], dict[str, Any]()
    exec(compile("def asks(thing): return isinstance(thing, int)", torch.__file__, "exec"), scope)
    other = threading.Thread(target=lambda: found.append(isinstance(symbol, int)))
    with symbols_are_numbers():
        assert isinstance(symbol, int)
        assert isinstance(symbol, torch.SymInt)
        assert not scope["asks"](symbol)
        other.start()
        other.join()
        with symbols_are_numbers():
            assert isinstance(symbol, int)
        assert isinstance(symbol, int)  # one capture within another ends, and the outer one goes on
    assert found == [False]
    assert not isinstance(symbol, int)


class Meta(type):
    """Of a class that a step makes."""


def test_types_are_what_they_are() -> None:
    def step(x: Tensor) -> Tensor:
        made = type("Made", (), {"scale": 2.0})
        kinds = isinstance(made, type), isinstance(x, type), type(x).__mro__[-1] is object, type(made) is type(int)
        assert kinds == (True, False, True, True)
        assert type(made()).__name__ == "Made"
        assert isinstance(Meta("Other", (), {}), type)
        return x * made.scale

    x = torch.ones(3)
    assert torch.equal(ws.compile(step, fullgraph=True)(x), x * 2.0)
    assert "type" not in globals()
