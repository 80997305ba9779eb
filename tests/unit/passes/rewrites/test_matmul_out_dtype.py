"""Weight gradients as products in float32: which, where they stand, and what becomes of the numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import nn

from tests.unit.capture.steps import captured
from wholestep.config import DDP
from wholestep.cost.cost_model import CostModel
from wholestep.ir import op_info
from wholestep.ir.ops.collectives import ALL_REDUCE_WIDE
from wholestep.ir.program import MeshAxis, Program
from wholestep.ir.segment import Segment
from wholestep.lower.inductor import segment_compiler
from wholestep.passes.comm.fold_mean import fold_mean
from wholestep.passes.default_passes import passes_of
from wholestep.passes.pass_manager import Pass, run_passes
from wholestep.passes.rewrites.matmul_out_dtype import WIDE, widen_matmul_out_dtype
from wholestep.passes.schedule.form_segments import form_segments
from wholestep.place.strategies import place

aten = torch.ops.aten
AXIS = MeshAxis(name="data", size=2, group="0")
COST = CostModel.default("cpu+gloo")
WIDEN: Pass = partial(widen_matmul_out_dtype, widens=lambda node: True)
AVERAGE: Pass = partial(fold_mean, averages=lambda group, device: True)
FORM: Pass = partial(form_segments, compiles=segment_compiler.compiles, may_postpone=segment_compiler.may_follow)


class Net(nn.Module):
    """Tokens of 40 -> an embedding of 16 -> two linear layers of 64 and 40."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(40, 16)
        self.body = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 40))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.body(self.tokens(tokens))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss = torch.nn.functional.cross_entropy(model(tokens).float(), tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.fixture
def training() -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.arange(40)


def planned(training: tuple[Any, ...], *lowering: Pass, bucket_bytes: int = 1 << 20, until: int = 0) -> Program:
    placed = place(captured(step, *training).program, DDP(), (AXIS,))
    passes = passes_of(cost=COST, bucket_bytes=bucket_bytes, lowering=lowering)
    return run_passes(placed, passes[: len(passes) - until])


def calls(program: Program, target: Any) -> list[fx.Node]:
    return program.graph.find_nodes(op="call_function", target=target)


def test_products_write_to_their_slice_of_the_bucket(training):
    program = planned(training, AVERAGE, WIDEN, FORM)
    wide = calls(program, aten.mm.dtype_out)
    (start,) = (node for node in program.graph.nodes if op_info.is_collective(node))
    (bucket,) = {node.kwargs["out"].args[0] for node in wide}
    assert len(wide) == 2
    assert start.args == (bucket, "avg", "0")
    assert not calls(program, aten.cat.default)
    notes = [note for record in program.history for note in record.notes]
    assert f"2 weight gradients are products in float32: no casts of {6 * (16 * 64 + 64 * 40):,} B" in notes


def test_segments_are_not_cut_by_products(training):
    def segments(*lowering: Pass) -> int:
        return sum(isinstance(node.target, Segment) for node in planned(training, *lowering).graph.nodes)

    assert segments(AVERAGE, WIDEN, FORM) == segments(AVERAGE, FORM)
    cut = partial(form_segments, compiles=segment_compiler.compiles)
    assert segments(AVERAGE, WIDEN, cut) > segments(AVERAGE, FORM)


class Alone(fx.Interpreter):
    """Runs a functional graph of one rank; products with results in a type that is asked for have float32 factors."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is WIDE:
            return (args[0].float() @ args[1].float()).to(args[2])
        if target is ALL_REDUCE_WIDE:
            return args[0].to(args[2]) / 2
        if target in op_info.COLLECTIVES:
            return args[0] / 2 if args[1] == "avg" else args[0]
        return args[0] if target is op_info.WAIT else super().call_function(target, args, kwargs)


def run(program: Program, training: tuple[Any, ...]) -> list[torch.Tensor]:
    model, _, tokens = training
    named = dict(model.named_parameters())
    inputs = [named.get(record.name, tokens if record.dtype == torch.int64 else 0.1) for record in program.inputs]
    with torch.no_grad():
        found = Alone(program.module).run(*inputs)
    return [one for one in found if isinstance(one, torch.Tensor)]


def test_the_numbers_differ_by_the_rounding_that_is_left_out(training):
    narrow = run(planned(training, until=2), training)
    wide = run(planned(training, AVERAGE, WIDEN, until=2), training)
    moved = [(a - b).abs().max() for a, b in zip(narrow, wide, strict=True)]
    assert any(one > 0 for one in moved)
    for one, other, before in zip(wide[1:], narrow[1:], training[0].parameters(), strict=True):
        # An update is a tenth of a gradient, which bfloat16 rounds by one part in 256.
        torch.testing.assert_close(one - before, other - before, rtol=2**-8, atol=1e-7)


def test_what_is_no_gradient_of_a_bucket_stays_narrow(training):
    """The logits are cast to float32, too, and a bucket that products would fill less than half."""
    assert len(calls(planned(training, AVERAGE, WIDEN, until=2), WIDE)) == 2
    model, _, tokens = training
    model.tokens = nn.Embedding(4000, 16)
    large = model, torch.optim.SGD(model.parameters(), lr=0.1), tokens
    assert not calls(planned(large, AVERAGE, WIDEN, until=2), WIDE)
    split = planned(large, AVERAGE, WIDEN, bucket_bytes=1, until=2)
    assert len(calls(split, WIDE)) == 2


def test_a_device_that_cannot_keeps_its_casts(training):
    program = planned(training, AVERAGE, partial(widen_matmul_out_dtype, widens=segment_compiler.widens), FORM)
    assert not calls(program, WIDE)
    assert not calls(program, aten.mm.dtype_out)
