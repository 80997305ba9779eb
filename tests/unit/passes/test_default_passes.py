"""What the passes make of a GPT with 12 layers on 4 ranks: where its communication and its updates stand.

The model has no memory (device ``meta``) and nothing runs: this is about the order of nodes, bytes and predicted times.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from tests.unit.capture.steps import finish, program_of
from wholestep.cli.workloads.gpt import GPT, GPTConfig
from wholestep.config import DDP
from wholestep.cost.cost_model import CostModel
from wholestep.cost.liveness import Ledger
from wholestep.cost.simulator import Timeline, simulate
from wholestep.ir import graph_edit, node_meta, op_info
from wholestep.ir.node_meta import Region
from wholestep.ir.program import MeshAxis, Program
from wholestep.passes.analysis.task_graph import Tasks, sharing, tasks_of
from wholestep.passes.default_passes import passes_of
from wholestep.passes.pass_manager import run_passes
from wholestep.place.strategies import place

COST = CostModel.default("h200+nvlink")
RANKS = 4


@dataclass(frozen=True)
class Plan:
    """A planned step: the functional program in its order, as numbers too."""

    placed: Program
    program: Program
    found: Tasks
    timeline: Timeline
    param_bytes: dict[str, int]

    def starts(self) -> list[int]:
        return [n for n, node in enumerate(self.found.nodes) if op_info.is_collective(node)]

    def bucket(self, number: int) -> node_meta.Bucket:
        record = node_meta.bucket(self.found.nodes[number])
        assert record is not None
        return record

    def region(self, *regions: Region) -> list[int]:
        return [
            n for n, node in enumerate(self.found.nodes)
            if node_meta.origin(node).region in regions and not op_info.is_collective(node) and node.target is not
            op_info.WAIT and self.found.tasks[n].us > 0
        ]  # fmt: skip


def captured(*, clip: bool) -> tuple[Program, dict[str, int]]:
    with torch.device("meta"):
        model = GPT(GPTConfig(num_layers=12, num_heads=12, width=768, context=1024))
        tokens = torch.zeros(8, 1024, dtype=torch.long)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)

    def train(x: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
        return finish(model, opt, loss, clip=clip)

    return program_of(train, tokens), {name: p.numel() * p.element_size() for name, p in model.named_parameters()}


def planned(captured: tuple[Program, dict[str, int]]) -> Plan:
    program, sizes = captured
    placed = place(program, DDP(), (MeshAxis(name="data", size=RANKS, group="0"),))
    ordered = run_passes(placed, passes_of(cost=COST)[:-2])  # all but what runs in place
    found = tasks_of(ordered, COST)
    return Plan(placed, ordered, found, simulate(found.tasks, sharing=sharing(COST)), sizes)


@pytest.fixture(scope="module")
def plain() -> Plan:
    return planned(captured(clip=False))


@pytest.fixture(scope="module")
def clipped() -> Plan:
    return planned(captured(clip=True))


def test_one_all_reduce_per_bucket_and_every_byte_once(plain):
    starts = plain.starts()
    assert sum(op_info.is_collective(node) for node in plain.placed.graph.nodes) == len(plain.param_bytes)
    assert 4 <= len(starts) <= 20
    carried = [node_meta.num_bytes(plain.found.nodes[number].args[0]) for number in starts]
    members = [plain.bucket(number).members for number in starts]
    sizes = {name.removeprefix("model."): size for name, size in plain.param_bytes.items()}
    assert [sum(sizes[name.removeprefix("model.")] for name in names) for names in members] == carried
    assert sum(carried) == sum(sizes.values())
    assert len({name for names in members for name in names}) == len(sizes)


def test_the_first_starts_early_in_the_backward(plain):
    backward = plain.region(Region.BACKWARD)
    begin, end = plain.timeline.start_us[backward[0]], plain.timeline.end_us[backward[-1]]
    first = plain.starts()[0]
    ready = max(plain.timeline.end_us[dep] for dep in plain.found.tasks[first].deps)
    issued = plain.timeline.comm_start_us[first]
    assert issued - ready <= 0.01 * (end - begin)
    assert issued - begin < 0.15 * (end - begin)


def test_every_collective_starts_as_soon_as_its_input_exists(plain):
    for number in plain.starts():
        assert number - 1 in plain.found.tasks[number].deps or plain.found.tasks[number - 1].us == 0


def test_almost_nothing_is_exposed(plain, clipped):
    for plan in (plain, clipped):
        assert plan.timeline.total_exposed_us <= 0.02 * plan.timeline.total_us


def test_updates_stand_in_the_backward(plain):
    last_backward = plain.region(Region.BACKWARD)[-1]
    updates = plain.region(Region.OPTIMIZER)
    early = [number for number in updates if number < last_backward]
    assert len(early) > 0.5 * len(updates)


def test_with_clipping_norms_stand_in_the_backward_and_updates_behind_the_last_bucket(clipped):
    last_backward = clipped.region(Region.BACKWARD)[-1]
    norm = torch.ops.aten.linalg_vector_norm.default  # without memory there is no foreach kernel for it
    norms = [n for n, node in enumerate(clipped.found.nodes) if node.target is norm]
    assert len(norms) == len(clipped.param_bytes) + 1
    assert sum(number < last_backward for number in norms) > 0.5 * len(norms)
    last_wait = max(n for n, node in enumerate(clipped.found.nodes) if node.target is op_info.WAIT)
    add = torch.ops.aten._foreach_add.List  # momentum, then parameters: of one bucket each
    writes = [n for n, node in enumerate(clipped.found.nodes) if node.target is add]
    assert len(writes) == 2 * len(clipped.starts())
    assert min(writes) > last_wait


def test_gradients_alive_behind_the_backward_are_those_not_yet_updated(plain):
    """Live bytes at the end of the backward = parameter bytes - bytes of the buckets that are updated by then.

    As placed it is all of them: a gradient for each parameter.
    """
    all_bytes = sum(plain.param_bytes.values())
    updated = 0
    behind = plain.region(Region.BACKWARD)[-1]
    for start in plain.starts():
        readers = later(plain, start)
        if readers and max(readers) <= behind:
            updated += plain.bucket(start).num_bytes
    assert updated > 0.5 * all_bytes
    before = tasks_of(plain.placed, COST)
    ends = [n for n, node in enumerate(before.nodes) if node_meta.origin(node).region is Region.BACKWARD]
    assert live_bytes(before, max(ends)) == pytest.approx(all_bytes, rel=0.01)
    assert live_bytes(plain.found, behind) == pytest.approx(all_bytes - updated, abs=1024)


def later(plan: Plan, start: int) -> list[int]:
    """The nodes that read a bucket, by way of its wait and views."""
    found, stack = [], [plan.found.nodes[start]]
    number_of = {node: number for number, node in enumerate(plan.found.nodes)}
    while stack:
        for user in stack.pop().users:
            if user.op == "output":
                continue
            if op_info.viewed_args(user.target) and not op_info.is_indexwise(user.target):
                stack.append(user)
            else:
                found.append(number_of[user])
    return found


def live_bytes(found: Tasks, until: int) -> int:
    ledger = Ledger(found.usages, pinned=found.pinned, writable=found.writable)
    for number in range(until + 1):
        ledger.run(number)
    return ledger.live_bytes


def test_planning_is_quick(clipped):
    """Against copies of the graph, as a machine that is slow or busy is so with both."""

    def spent_s(work):
        start = time.process_time()
        work()
        return time.process_time() - start

    copying_s = min(spent_s(lambda: graph_edit.copy(clipped.placed)) for _ in range(5))
    planning_s = min(spent_s(lambda: run_passes(clipped.placed, passes_of(cost=COST))) for _ in range(2))
    assert planning_s < 60 * copying_s  # 15, and 24 where others use the cores
