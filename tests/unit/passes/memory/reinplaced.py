"""Programs before and after `reinplace`, which must give the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.unit import builders
from tests.unit.builders import aten, c10d
from wholestep.ir import op_info
from wholestep.ir.program import Program, Stage
from wholestep.lower.base import eager_backend
from wholestep.passes.memory.reinplace import reinplace
from wholestep.passes.pass_manager import run_passes
from wholestep.passes.rewrites.dead_code import eliminate_dead_code


def scheduled(program: Program) -> Program:
    return run_passes(builders.without_gradients(program), [eliminate_dead_code, reinplace])


def check(program: Program, tensors: list[torch.Tensor]) -> Program:
    """The program after the pass, which gives the same bits."""
    after = scheduled(program)
    assert after.stage is Stage.SCHEDULED
    assert builders.same(builders.execute(after, tensors), builders.execute(program, tensors))
    return after


def copies(program: Program) -> int:
    return builders.count(program, aten.copy_.default, aten._foreach_copy_.default, aten.clone.default)


def check_placed(fn: Callable[..., Any], tensors: list[torch.Tensor]) -> Program:
    """The same for a step on two ranks."""
    program = builders.place(builders.capture(fn, tensors))
    after = run_passes(program, [reinplace])
    assert builders.same(builders.execute(after, tensors), builders.execute(program, tensors))
    return after


def reduce(tensor: torch.Tensor) -> torch.Tensor:
    return op_info.WAIT(c10d.all_reduce.default(tensor, "sum", builders.world_group()))


def assert_results_last(program: Program, tensors: list[torch.Tensor]) -> None:
    """What one call returns is not changed by the next."""
    with torch.no_grad():
        returned = [one for one in eager_backend.lower(program)(tensors) if one is not None]
        kept = [one.clone() for one in returned]
        eager_backend.lower(program)(tensors)
    assert builders.same(returned, kept)
