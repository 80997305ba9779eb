"""explain(): the numbers are those of the graph, they add up, and machines can read them."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.unit.capture.steps import program_of, train
from wholestep.api.report.explain import explain
from wholestep.api.report.prediction import Category
from wholestep.api.report.records import Explanation
from wholestep.config import DDP
from wholestep.cost.cost_model import CostModel
from wholestep.cost.simulator import simulate
from wholestep.ir import node_meta, op_info
from wholestep.ir.program import MeshAxis, Program
from wholestep.passes.analysis.task_graph import sharing, tasks_of
from wholestep.passes.default_passes import passes_of
from wholestep.passes.pass_manager import pass_name, run_passes
from wholestep.place.strategies import place

CAP_BYTES = 400
COST = CostModel.default("cpu+gloo")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 2))
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x: Any) -> Any:
        return self.frozen(self.layers(x))


@pytest.fixture(scope="module")
def axis() -> Iterator[MeshAxis]:
    """Two ranks that are not there: nothing is sent while a graph is only looked at."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield MeshAxis(name="data", size=2, group=dist.group.WORLD.group_name)  # type: ignore[union-attr]
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return Net()


@pytest.fixture(scope="module")
def placed(axis: MeshAxis, model: nn.Module) -> Program:
    opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return place(program_of(train, model, opt, torch.randn(3, 4)), DDP(bucket_bytes=CAP_BYTES), (axis,))


@pytest.fixture(scope="module")
def scheduled(placed: Program) -> Program:
    return run_passes(placed, passes_of(cost=COST, bucket_bytes=CAP_BYTES))


def explained(program: Program, cost: CostModel = COST, **options: Any) -> Explanation:
    return explain(program, step="train", strategy="DDP", backend="eager", cost=cost, **options)


@pytest.fixture(scope="module")
def explanation(scheduled: Program) -> Explanation:
    return explained(scheduled)


def trained(model: nn.Module) -> dict[str, int]:
    """Bytes of each parameter that is trained."""
    return {name: 4 * param.numel() for name, param in model.named_parameters() if param.requires_grad}


def test_every_trained_parameter_is_in_one_bucket(explanation: Explanation, model: nn.Module) -> None:
    members = [name for collective in explanation.collectives for name in collective.members]
    assert sorted(members) == sorted(trained(model))
    for name in members:
        number = explanation.bucket_of(name)
        assert number is not None
        assert name in explanation.collectives[number].members
    assert explanation.bucket_of("frozen.weight") is None


def test_bytes_of_a_bucket_are_those_of_its_members(explanation: Explanation, model: nn.Module) -> None:
    sizes = trained(model)
    buckets = [collective for collective in explanation.collectives if collective.members]
    assert len(buckets) > 1
    assert [c.num_bytes for c in buckets] == [sum(sizes[name] for name in c.members) for c in buckets]
    assert sum(c.num_bytes for c in buckets) == sum(sizes.values())
    assert all(c.num_bytes >= CAP_BYTES for c in buckets[:-1])
    assert {(c.op, c.dtype, c.axis) for c in buckets} == {("all_reduce", "float32", "data")}


def test_broadcasts_of_buffers_are_told(explanation: Explanation) -> None:
    others = [c for c in explanation.collectives if not c.members]
    assert {(c.op, c.dtype, c.num_bytes) for c in others} == {("broadcast", "float32", 64), ("broadcast", "int64", 8)}
    assert len(others) == 2
    assert {c.reason for c in others} == {"buffers of rank 0 before the step"}


def test_collectives_are_numbered_in_order(explanation: Explanation, scheduled: Program) -> None:
    nodes = [node for node in scheduled.graph.nodes if op_info.is_collective(node)]
    assert [c.number for c in explanation.collectives] == list(range(len(nodes)))
    assert [c.num_bytes for c in explanation.collectives] == [node_meta.num_bytes(node.args[0]) for node in nodes]


def test_predicted_times_add_up(explanation: Explanation, scheduled: Program) -> None:
    """compute + slowdown + exposed is the step on the device; what hides a collective fits into its time."""
    step = explanation.predicted
    timeline = simulate(tasks_of(scheduled, COST).tasks, sharing=sharing(COST))
    assert step.step_us == pytest.approx(timeline.total_us)
    assert sum(c.exposed_us for c in explanation.collectives) == pytest.approx(step.exposed_us)
    assert step.exposed_us > 0
    assert step.host_us == 0  # the CPU is host and device
    for c in explanation.collectives:
        hidden_us = sum(one.us for one in c.hidden_by)
        assert c.predicted_us > 0
        assert 0 <= c.start_us <= step.step_us - c.predicted_us + 1e-6
        assert hidden_us <= c.predicted_us + 1e-6
    # One link, so while one of them is under way the device computes or stands still for one of them.
    hidden_us = sum(one.us for c in explanation.collectives for one in c.hidden_by)
    assert hidden_us + step.exposed_us == pytest.approx(sum(c.predicted_us for c in explanation.collectives))


def test_collectives_of_one_group_go_one_after_another(explanation: Explanation) -> None:
    ends = [c.start_us + c.predicted_us for c in explanation.collectives]
    assert all(c.start_us >= end - 1e-6 for c, end in zip(explanation.collectives[1:], ends, strict=False))


def test_what_hides_a_collective_is_named(explanation: Explanation) -> None:
    names = {(one.region, one.module) for c in explanation.collectives for one in c.hidden_by}
    assert {region for region, _ in names} <= {region.value for region in node_meta.Region}
    assert ("backward", "layers.0") in names or ("optimizer", "") in names
    times = [[one.us for one in c.hidden_by] for c in explanation.collectives]
    assert times == [sorted(row, reverse=True) for row in times]


def test_a_driven_device_waits_for_its_host(scheduled: Program) -> None:
    gpu = CostModel.default("h200+nvlink")
    step = explained(scheduled, gpu).predicted
    num_collectives = sum(map(op_info.is_collective, scheduled.graph.nodes))
    host_us = sum(map(gpu.host_us, scheduled.graph.nodes)) + num_collectives * gpu.launch_us
    assert step.host_us == pytest.approx(host_us)
    assert step.step_us == max(step.device_us, step.host_us)
    assert step.cost_source == gpu.source
    graphed = explained(scheduled, gpu, one_launch=True).predicted
    assert 0 < graphed.host_us == gpu.launch_us < step.host_us
    assert graphed.device_us == step.device_us


def test_categories_add_up_to_the_peak(explanation: Explanation, model: nn.Module) -> None:
    by_category = explanation.peak.by_category
    assert sum(by_category.values()) == explanation.peak.num_bytes
    assert list(by_category) == [category.value for category in Category]
    assert by_category["parameters"] == explanation.param_bytes
    assert by_category["optimizer state"] == 0  # SGD without momentum keeps none
    assert explanation.peak.node


def test_parameters_and_nodes_add_up(explanation: Explanation, scheduled: Program, model: nn.Module) -> None:
    assert explanation.num_params == len(list(model.parameters()))
    assert explanation.param_bytes == sum(4 * param.numel() for param in model.parameters())
    assert explanation.num_nodes == sum(node.op == "call_function" for node in scheduled.graph.nodes)
    assert sum(explanation.nodes_by_region.values()) == explanation.num_nodes
    assert explanation.num_ranks == 2


def test_passes_are_told_in_order(explanation: Explanation, scheduled: Program) -> None:
    names = [pass_name(one) for one in passes_of(cost=COST)]
    assert [line.name for line in explanation.passes][-len(names) :] == names
    assert explanation.passes[-1].num_nodes == len(scheduled.graph.nodes)
    assert [line.notes for line in explanation.passes] == [record.notes for record in scheduled.history]


def test_before_bucketing_each_gradient_travels_alone(placed: Program, model: nn.Module) -> None:
    buckets = [c for c in explained(placed).collectives if c.members]
    assert all(len(c.members) == 1 for c in buckets)
    assert {c.members[0]: c.num_bytes for c in buckets} == trained(model)


def test_it_can_be_sent(explanation: Explanation) -> None:
    assert pickle.loads(pickle.dumps(explanation)) == explanation
    came = json.loads(json.dumps(explanation.to_json()))
    assert came["param_bytes"] == explanation.param_bytes
    assert [c["num_bytes"] for c in came["collectives"]] == [c.num_bytes for c in explanation.collectives]
    assert [tuple(c["members"]) for c in came["collectives"]] == [c.members for c in explanation.collectives]


def test_it_prints_as_tables(explanation: Explanation, model: nn.Module) -> None:
    text = str(explanation)
    assert "train: " in text
    assert "DDP on 2 ranks" in text
    assert all(name in text for name in trained(model))
    assert "Collectives, in order" in text
    assert max(map(len, text.splitlines())) <= 120


def test_a_program_without_collectives_says_so() -> None:
    model = nn.Linear(4, 2)
    program = program_of(train, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(3, 4))
    text = str(explained(program))
    assert "No collectives: the step runs on one rank." in text
    assert "on 1 rank," in text
