"""The limit: the scheduled graph as it is, without what starts and ends collectives."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit import builders
from wholestep.cli.suite.no_comm_bound import SilentStep, without_communication
from wholestep.cost.cost_model import CostModel
from wholestep.errors import InternalError
from wholestep.ir import node_meta, op_info
from wholestep.ir.program import InputKind, Program
from wholestep.lower.base import eager_backend
from wholestep.passes.default_passes import passes_of
from wholestep.passes.pass_manager import run_passes

NOWHERE = "a group that does not exist"


def step(first: Tensor, second: Tensor, x: Tensor) -> tuple[Tensor]:
    for name, param in (("second", second), ("first", first)):
        param.sub_(builders.gradient(param * x.sum(), name))
    return (x.sum(),)


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.rand(3, 2), torch.rand(4), torch.ones(2)]


@pytest.fixture
def scheduled() -> Program:
    kinds = [InputKind.PARAM, InputKind.PARAM, InputKind.USER]
    captured = builders.capture(step, inputs(), names=["first", "second", "x"], kinds=kinds)
    placed = builders.place(captured, group=NOWHERE)
    return run_passes(placed, passes_of(cost=CostModel.default("cpu+gloo")))


def communicates(node: Any) -> bool:
    return op_info.is_collective(node) or node.target is op_info.WAIT


def test_only_communication_goes(scheduled: Program) -> None:
    before = [node.name for node in scheduled.graph.nodes]
    limit = without_communication(scheduled)
    assert any(map(communicates, scheduled.graph.nodes))
    assert [node.name for node in scheduled.graph.nodes] == before  # it was copied
    kept = [node.target for node in scheduled.graph.nodes if not communicates(node)]
    assert [node.target for node in limit.graph.nodes] == kept


def test_every_rank_goes_its_own_way(scheduled: Program) -> None:
    first, second, x = inputs()
    with torch.no_grad():
        SilentStep(step)._stages.backend.lower(scheduled)([first, second, x])
    for found, old in zip((first, second), inputs(), strict=False):
        torch.testing.assert_close(found, old - old * 2 / 2)  # half of its own gradient, and nothing of others
    with pytest.raises(Exception, match=NOWHERE), torch.no_grad():
        eager_backend.lower(scheduled)(inputs())


def test_a_collective_that_is_not_in_place_keeps_its_copy(scheduled: Program) -> None:
    node = next(node for node in scheduled.graph.nodes if op_info.is_collective(node))
    node.target = op_info.c10d.all_reduce.default
    limit = without_communication(scheduled)
    assert any(node.target is torch.ops.aten.clone.default for node in limit.graph.nodes)
    node_meta.set_value(node, torch.empty(1))
    with pytest.raises(InternalError, match="another shape"):
        without_communication(scheduled)
