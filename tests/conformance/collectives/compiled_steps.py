"""Runs a step with collectives eagerly and compiled, on every rank, and reads the text of the program that ran."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import wholestep as ws
from tests.harness.equality import equal
from wholestep.ir.printer import source
from wholestep.ir.program import Program

c10d = torch.ops._c10d_functional
ROWS, COLUMNS, CALLS = 4, 6, 3
Step = Callable[[Tensor, Tensor], Any]


def tensors(call: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """The arguments of one call on this rank."""
    generator = torch.Generator().manual_seed(100 * call + dist.get_rank())
    device = ws.init().device
    return tuple(torch.randn(rows, COLUMNS, generator=generator).to(device) for _ in range(2))  # type: ignore[return-value]


def leaves(result: Any) -> list[Any]:
    if isinstance(result, (list, tuple)):
        return [leaf for one in result for leaf in leaves(one)]
    return [result]


def compared(step: Step, calls: list[int] | None = None) -> str:
    """Runs the step both ways and gives the text of the program that ran."""
    return text_of(run_both(step, calls).program())


def run_both(step: Step, calls: list[int] | None = None, **options: Any) -> ws.CompiledStep:
    """Eager and compiled calls with so many rows each: equal bit for bit, a trace for each. Gives the compiled step."""
    compiled = ws.compile(step, **options, fullgraph=True, dynamic=False)
    for call, rows in enumerate(calls or [ROWS] * CALLS):
        here, there = tensors(call, rows), tensors(call, rows)
        wanted, found = leaves((step(*here), here)), leaves((compiled(*there), there))
        assert len(wanted) == len(found)
        for position, (a, b) in enumerate(zip(wanted, found, strict=True)):
            assert equal(a, b), f"call {call}, value {position}: {a} is not {b}"
    assert compiled.cache_info().traces == len(set(calls or [ROWS]))
    return compiled


def text_of(program: Program) -> str:
    return source(program, comments=False)


def count(text: str, name: str) -> int:
    """How often the operator is called."""
    return len(re.findall(rf"\b(?:_c10d_functional|aten|wholestep)\.{name}\.", text))


def copies(text: str) -> int:
    """Calls that do nothing but move bytes."""
    names = ("clone", "copy", "copy_", "_foreach_copy_", "empty_like", "contiguous", "cat", "stack")
    return sum(count(text, name) for name in names)


def group_size() -> int:
    return dist.get_world_size()


def run(pool: Any, step: Step, *rest: Any) -> list[str]:
    """The texts of the ranks, which are the same."""
    texts = pool.run(compared, step, *rest)
    assert len(set(texts)) == 1, "the text of the graph depends on the rank"
    return texts[0]


def refused(step: Step) -> str:
    with pytest.raises(ws.CaptureError) as caught:
        ws.compile(step, fullgraph=True)(*tensors(0))
    return str(caught.value)
