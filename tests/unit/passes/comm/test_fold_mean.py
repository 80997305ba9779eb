"""Reductions that average on the way: which may, and what is left of the multiplication."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.unit import builders
from tests.unit.builders import gradient
from wholestep.cost.cost_model import CostModel
from wholestep.ir import op_info
from wholestep.ir.ops.collectives import averages
from wholestep.ir.program import Program
from wholestep.passes.comm.fold_mean import fold_mean
from wholestep.passes.default_passes import passes_of
from wholestep.passes.pass_manager import run_passes

COST = CostModel.default("cpu+gloo")
X, Y = torch.randn(6, 4), torch.randn(6, 3)


def linear(x, y):
    return gradient(y.t() @ x, "weight"), gradient(y.sum(0), "bias")


def reductions(program: Program) -> list[tuple[object, ...]]:
    return [node.args[1:] for node in program.graph.nodes if op_info.is_collective(node)]


def planned(dtype: torch.dtype = torch.float32, *, averages: bool = True, **options: object) -> Program:
    placed = builders.place(builders.capture(linear, [X.to(dtype), Y.to(dtype)]), **options)
    lowering = [partial(fold_mean, averages=lambda group, device: averages)]
    return run_passes(placed, passes_of(cost=COST, bucket_bytes=1 << 20, lowering=lowering))


def muls(program: Program) -> int:
    return sum("mul" in str(node.target) for node in program.graph.nodes)


def test_the_reduction_takes_over_the_multiplication():
    program = planned()
    assert [args[0] for args in reductions(program)] == ["avg"]
    assert muls(program) == 0
    (note,) = [note for record in program.history for note in record.notes if "average on the way" in note]
    assert f"{2 * 4 * (3 * 4 + 3)} B less" in note


def test_a_backend_that_cannot_average_multiplies():
    program = planned(averages=False)
    assert [args[0] for args in reductions(program)] == ["sum"]
    assert muls(program) == 1
    assert not averages("0", torch.device("cpu"))


@pytest.mark.parametrize(("dtype", "size", "op"), [
    (torch.bfloat16, 2, "avg"), (torch.bfloat16, 3, "sum"), (torch.float32, 3, "avg"), (torch.float64, 6, "avg"),
    (torch.float16, 4, "avg"), (torch.complex64, 2, "sum"),
])  # fmt: skip
def test_a_small_type_averages_where_the_inverse_is_exact(dtype: torch.dtype, size: int, op: str):
    assert [args[0] for args in reductions(planned(dtype, size=size))] == [op]


def test_sums_stay_sums():
    assert [args[0] for args in reductions(planned(mean=False))] == ["sum"]
