"""Options of Inductor that depend on what it compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from wholestep.lower import compiler
from wholestep.lower.compiler import _LENIENT, _ROWS_OF_PROGRAM, settings_for

aten = torch.ops.aten


def traced(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> fx.Graph:
    with FakeTensorMode():
        return make_fx(fn)(*(torch.empty(shape) for shape in shapes)).graph


def down(x: Tensor) -> Tensor:
    return aten.sum.dim_IntList(x, list(range(x.ndim - 1)))


def along(x: Tensor) -> Tensor:
    return aten.sum.dim_IntList(x, [-1])


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        ((511, 8), None), ((512, 8), 1), ((1000, 8), 1), ((1024, 8), 2), ((2, 512, 8), 2), ((2047, 8), 2),
        ((2048, 8), 4), ((4095, 8), 4), ((4096, 8), None), ((8, 1024, 8), None),
    ],
)  # fmt: skip
def test_programs_of_a_norms_gradient_have_few_rows_where_there_are_few(
    shape: tuple[int, ...], rows: int | None
) -> None:
    def norm(x: Tensor) -> tuple[Tensor, ...]:
        return along(x), down(x), down(x * x)

    found = settings_for(traced(norm, shape), "cuda")
    wanted = {} if rows is None else {_LENIENT: True, _ROWS_OF_PROGRAM: rows}
    assert found == compiler._SETTINGS["cuda"] | wanted
    assert settings_for(traced(norm, shape), "cpu") == compiler._SETTINGS["cpu"]


def test_other_sums_and_sums_of_several_sizes_change_nothing() -> None:
    plain = compiler._SETTINGS["cuda"]
    assert settings_for(traced(along, (1024, 8)), "cuda") == plain
    assert settings_for(traced(lambda x: aten.sum.dim_IntList(x, [0]), (1024, 8, 8)), "cuda") == plain
    assert settings_for(traced(lambda x: aten.sum.dim_IntList(x, None), (1024, 8)), "cuda") == plain
    assert settings_for(traced(lambda x: aten.sum.dim_IntList(x, [0]), (1024,)), "cuda") == plain
    assert settings_for(traced(lambda x, y: (down(x), down(y)), (1024, 8), (64, 8)), "cuda") == plain
    assert settings_for(traced(lambda x, y: (down(x), down(y)), (1024, 8), (8192, 8)), "cuda") == plain


def test_without_these_options_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = traced(down, (1024, 8))
    assert _LENIENT in settings_for(graph, "cuda")
    monkeypatch.setattr(compiler, "_ROWS_OF_PROGRAM", "triton.no_such_option")
    assert settings_for(graph, "cuda") == compiler._SETTINGS["cuda"]
