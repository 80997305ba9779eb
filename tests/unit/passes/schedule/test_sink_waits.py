"""delay_waits: nothing that could run waits with an update."""

from __future__ import annotations

import torch
import torch.fx as fx
from torch import nn

from tests.unit import builders
from tests.unit.builders import gradient
from tests.unit.capture.steps import captured
from wholestep.config import DDP
from wholestep.cost.cost_model import CostModel
from wholestep.ir import op_info
from wholestep.ir.program import MeshAxis, Program
from wholestep.passes.default_passes import passes_of
from wholestep.passes.pass_manager import run_passes
from wholestep.passes.schedule.sink_waits import sink_waits
from wholestep.place.strategies import place

COST = CostModel.default("cpu+gloo")


def needless(program: Program) -> list[fx.Node]:
    """Waits after which something stands that does not read what has arrived."""
    found = []
    for node in program.graph.nodes:
        if node.target is not op_info.WAIT:
            continue
        behind, reader = {node}, node.next
        while op_info.is_view(reader) and behind.intersection(reader.all_input_nodes):
            behind.add(reader)
            reader = reader.next
        if not behind.intersection(reader.all_input_nodes):
            found.append(node)
    return found


def test_updates_do_not_wait_for_the_buckets_of_others():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    axis = MeshAxis(name="data", size=2, group="0")
    placed = place(captured(step, torch.randn(4, 8)).program, DDP(), (axis,))
    passes = passes_of(cost=COST, bucket_bytes=600)[:-2]
    early = run_passes(placed, passes)
    late = run_passes(placed, [*passes, sink_waits])
    assert needless(early)
    assert not needless(late)
    assert len(late.graph.nodes) == len(early.graph.nodes)


def early_waits(x, y):
    a, b = gradient(x * 2, "a"), gradient(y * 3, "b")
    return y.exp(), x + a, a.view(-1).sum(), y - b.t().t()


def test_values_are_the_same_bits():
    tensors = [torch.randn(4, 4), torch.randn(4, 4)]
    placed = builders.place(builders.capture(early_waits, tensors))
    late = run_passes(placed, [sink_waits])
    assert not needless(late)
    assert builders.same(builders.execute(late, tensors), builders.execute(placed, tensors))
