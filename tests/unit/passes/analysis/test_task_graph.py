"""A graph as numbers: what stands before what."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.fx as fx
from torch import Tensor, nn

from tests.unit import builders
from tests.unit.capture.steps import finish, program_of
from wholestep.config import DDP
from wholestep.cost.cost_model import CostModel
from wholestep.ir import op_info
from wholestep.ir.program import MeshAxis, Program
from wholestep.lower.inductor import segment_compiler
from wholestep.passes.analysis import task_graph, write_order
from wholestep.passes.analysis.task_graph import tasks_of
from wholestep.passes.default_passes import passes_of
from wholestep.passes.pass_manager import run_passes
from wholestep.passes.schedule import overlap
from wholestep.passes.schedule.form_segments import form_segments
from wholestep.passes.schedule.pack_scalars import pack_scalars
from wholestep.place.strategies import place

CALLS = CostModel.default("cpu+gloo")
KERNELS = replace(CALLS, compiles=segment_compiler.may_compile)
COMPILED = [
    partial(pack_scalars, reads=segment_compiler.reads_packed),
    partial(form_segments, compiles=segment_compiler.compiles),
]


def training(*, foreach: bool, clip: bool) -> Program:
    """AdamW by the calls that torch makes where nothing is fused, with two buckets on two ranks."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    opt = torch.optim.AdamW(model.parameters(), foreach=foreach)

    def train(x: Tensor) -> Tensor:
        return finish(model, opt, model(x).square().mean(), clip=clip)

    axis = MeshAxis(name="data", size=2, group=builders.world_group())
    return place(program_of(train, torch.ones(16, 256)), DDP(), (axis,))


@pytest.fixture(scope="module")
def clipped() -> Program:
    """After a norm over all gradients, with an update for each parameter."""
    return training(foreach=False, clip=True)


def early_updates(program: Program) -> int:
    """Calls that begin to update a parameter or its second moment before the last wait."""
    nodes, begun = list(program.graph.nodes), set(beginnings(program))
    last = max(place for place, node in enumerate(nodes) if node.target is op_info.WAIT)
    return sum(node in begun for node in nodes[:last])


def beginnings(program: Program) -> list[fx.Node]:
    """The decay of each parameter, and that of its second moment."""
    return [node for node in write_order.updates(program) if node.target is torch.ops.aten.mul.Tensor]


def planned(program: Program, cost: CostModel) -> Program:
    return run_passes(program, passes_of(cost=cost, bucket_bytes=600_000)[:-2])


def test_calls_that_become_one_kernel_wait_for_its_gradients(clipped: Program) -> None:
    found = tasks_of(clipped, KERNELS)
    waits = {number for number, node in enumerate(found.nodes) if node.target is op_info.WAIT}
    assert waits
    number_of = {node: number for number, node in enumerate(found.nodes)}
    assert len(beginnings(clipped)) == 2 * 8
    assert all(waits <= {*found.tasks[number_of[node]].deps} for node in beginnings(clipped))


def test_what_only_reads_a_parameter_begins_no_update() -> None:
    """Its result goes elsewhere, so nothing is gained where it stands beside the update."""
    model = nn.Linear(8, 8, bias=False)
    opt = torch.optim.AdamW(model.parameters(), foreach=False)

    def train(x: Tensor) -> tuple[Tensor, Tensor]:
        loss = model(x).square().mean()
        loss.backward()
        with torch.no_grad():
            told = model.weight * 2
        opt.step()
        return loss.detach(), told

    program = program_of(train, torch.ones(4, 8))
    readers = beginnings(program)
    begun = {first for first, _ in task_graph.fused_update_ends(program, segment_compiler.may_compile)}
    assert [node in begun for node in readers] == [False, True, True]


def test_calls_that_stay_calls_fill_the_time(clipped: Program) -> None:
    assert early_updates(planned(clipped, CALLS)) > 0
    assert early_updates(planned(clipped, KERNELS)) == 0


def copied(program: Program, cost: CostModel = KERNELS) -> str:
    """What the last pass says."""
    done = run_passes(program, passes_of(cost=cost, bucket_bytes=600_000, lowering=COMPILED))
    (said,) = [note for record in done.history for note in record.notes if "of inputs are copied" in note]
    return said


@pytest.mark.parametrize("where", ["cpu+gloo", "h200+nvlink"])
@pytest.mark.parametrize("foreach", [False, True], ids=["one by one", "lists"])
@pytest.mark.parametrize("clip", [False, True], ids=["plain", "clipped"])
def test_a_compiled_update_writes_in_place(where: str, foreach: bool, clip: bool) -> None:
    cost = replace(CostModel.default(where), compiles=segment_compiler.may_compile)
    assert copied(training(foreach=foreach, clip=clip), cost) == "0 B of inputs are copied at the end of the step"


@pytest.mark.parametrize("clip", [False, True], ids=["plain", "clipped"])
def test_in_parts_it_does_not(clip: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of calls that fill the time are for others to read."""
    monkeypatch.setattr(task_graph, "_fused_updates_wait", lambda *_: iter(()))
    monkeypatch.setattr(overlap, "_bring_together", lambda *_: None)
    assert "MiB of inputs are copied" in copied(training(foreach=True, clip=clip))
