"""Gradients of embeddings as rows: which, who chooses, what is the same on every rank, and what becomes of the plan."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import nn

from tests.unit.capture.steps import captured
from tests.unit.passes.rewrites.test_matmul_out_dtype import AVERAGE, AXIS, COST, FORM, calls, run
from wholestep.cli.suite.no_comm_bound import without_communication
from wholestep.config import DDP, CastCompress
from wholestep.config import Inductor as InductorOptions
from wholestep.cost.cost_model import CostModel
from wholestep.ir import node_meta, op_info, printer
from wholestep.ir.ops.collectives import ALL_REDUCE_BY_COPIES_, ALL_REDUCE_ROWS_
from wholestep.ir.program import Program
from wholestep.lower.inductor_backend import InductorBackend
from wholestep.lower.kernels import sparse_all_reduce
from wholestep.passes.analysis import task_graph
from wholestep.passes.comm import wire_format
from wholestep.passes.comm.use_copy_engine import use_copy_engine
from wholestep.passes.comm.wire_format import WireFormat, lookup_indices
from wholestep.passes.compress.compress import compress
from wholestep.passes.default_passes import passes_of
from wholestep.passes.pass_manager import Pass, run_passes
from wholestep.passes.rewrites.dead_code import eliminate_dead_code
from wholestep.place.strategies import place
from wholestep.runtime.verify import collective_semantics

aten = torch.ops.aten
COPIES: Pass = partial(use_copy_engine, why_not=lambda group, device: "")
WORDS, WIDTH = 200, 16


class Net(nn.Module):
    """(n) words -> (n, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(words))


class Twice(Net):
    """Looks its words up two times."""

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return super().forward(words) + self.head(self.words(words.flip(0)))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, words: torch.Tensor) -> torch.Tensor:
    loss = model(words).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def training(count: int = 12, net: Callable[[], nn.Module] = Net) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.arange(count) % WORDS


def tables(grad: fx.Node, group: str, max_rows: int = 20) -> WireFormat:
    """Gradients of two dimensions of which the first is long may go as rows."""
    return WireFormat(dtype=torch.float32, max_rows=max_rows if node_meta.tensor(grad).shape[0] >= WORDS else 0)


@pytest.fixture(autouse=True)
def all_by_copies(monkeypatch):
    monkeypatch.setattr("wholestep.passes.comm.use_copy_engine.MIN_BYTES", 0)


def placed(*training: Any) -> Program:
    return run_passes(place(captured(step, *training).program, DDP(), (AXIS,)), [eliminate_dead_code])


def planned(*training: Any, lowering: tuple[Pass, ...] = (AVERAGE, COPIES), until: int = 0, **options: Any) -> Program:
    options = {"cost": COST, "bucket_bytes": 1 << 20, "choose_wire_format": tables} | options
    passes = passes_of(lowering=lowering, **options)
    return run_passes(placed(*training), passes[: len(passes) - until])


def table_grad(program: Program) -> fx.Node:
    starts = calls(program, op_info.c10d.all_reduce.default)
    (start,) = (one for one in starts if node_meta.bucket(one).members == ("words.weight",))
    return start.args[0]


def test_indices_of_a_look_up_are_found():
    program = placed(*training())
    grad = table_grad(program)
    assert grad.target is aten.mul.Tensor
    indices = lookup_indices(grad)
    assert node_meta.tensor(indices).shape == (12,)
    assert lookup_indices(grad.args[0]) is indices
    grad.args = (grad.args[0], float("inf"))  # of which the product with zero is none
    assert lookup_indices(grad) is None
    assert lookup_indices(table_grad(placed(*training(net=Twice)))) is None


def test_a_table_has_a_bucket_of_its_own_and_goes_with_its_indices():
    program = planned(*training(), lowering=(AVERAGE, COPIES, FORM))
    (table,), (other,) = calls(program, ALL_REDUCE_ROWS_), calls(program, ALL_REDUCE_BY_COPIES_)
    assert node_meta.bucket(table).members == ("words.weight",)
    assert node_meta.bucket(table).as_rows
    assert node_meta.bucket(table).reason == "rows: a batch of rank 0 looks up 12 of 200"
    assert node_meta.bucket(other).members == ("head.weight", "head.bias")
    assert not node_meta.bucket(other).as_rows
    assert table.args[1:] == ("avg", "0")
    assert node_meta.tensor(table.args[0]).shape == (WORDS, WIDTH)
    assert node_meta.tensor(table.kwargs["indices"]).dtype is torch.int64
    notes = [note for record in program.history for note in record.notes]
    assert "bucket 1: 1 gradients, 12.5 KiB; rows: a batch of rank 0 looks up 12 of 200" in notes


def test_numbers_are_those_of_the_table_as_a_whole():
    whole = planned(*training(), until=2, choose_wire_format=wire_format.unchanged)
    as_rows = planned(*training(), until=2)
    assert all(map(torch.equal, run(whole, training()), run(as_rows, training())))
    values = [torch.randn(8, 3) for _ in range(3)]
    found = collective_semantics.RULES[op_info.ALL_REDUCE_ROWS]([(one, "avg", "0") for one in values])
    assert all(torch.equal(one, (values[0] + values[1] + values[2]) / 3) for one in found)


def test_many_rows_go_as_the_table():
    program = planned(*training(count=21))
    assert not calls(program, ALL_REDUCE_ROWS_)
    assert len(calls(program, ALL_REDUCE_BY_COPIES_)) == 1


def choose_as_rank_0(asked: list[str], with_rows: bool) -> Callable[..., Any]:
    """Knows what rank 0 has said, and does not ask anew."""

    def choose(text: str, plan: Callable[[], Any]) -> Any:
        asked.append(text)
        if not text.startswith("as rows"):
            return plan()
        assert all("12" not in line for line in text.splitlines()[1:]), "the text knows of a batch"
        return {2: "as rank 0 said"} if with_rows else {}

    return choose


@pytest.mark.parametrize("other", [training(count=13), training(count=150), training(net=Twice)])
def test_ranks_with_other_batches_do_as_rank_0_said(other: tuple[Any, ...]):
    """With more rows than pay, and with a gradient that is no look-up at all. What ranks compare is the same text."""
    asked: list[str] = []
    first = planned(*training(), bucket_bytes=None, choose=choose_as_rank_0(asked, True))
    program = planned(*other, bucket_bytes=None, choose=choose_as_rank_0(asked, True))
    (start,) = calls(program, ALL_REDUCE_ROWS_)
    assert node_meta.bucket(start).as_rows
    assert ("indices" in start.kwargs) == (not isinstance(other[0], Twice))
    assert printer.plan_text(program) == printer.plan_text(first)
    assert asked[0] == asked[2]
    assert asked[0].startswith("as rows")
    whole = planned(*training(), bucket_bytes=None, choose=choose_as_rank_0(asked, False))
    assert not calls(whole, ALL_REDUCE_ROWS_)
    assert printer.plan_text(whole) != printer.plan_text(first)


def test_nothing_is_asked_where_no_table_can_go_as_rows():
    asked: list[str] = []
    planned(*training(), choose=choose_as_rank_0(asked, True), choose_wire_format=partial(tables, max_rows=0))
    assert asked == []


def test_what_is_compressed_goes_as_a_whole():
    program = planned(*training(), compress=partial(compress, how=CastCompress(torch.bfloat16)))
    assert not calls(program, ALL_REDUCE_ROWS_)
    assert any(node_meta.tensor(node).dtype is torch.bfloat16 for node in calls(program, ALL_REDUCE_BY_COPIES_))


def test_buckets_and_schedule_know_what_rows_take():
    """Twelve rows go from each of two ranks to the other one; of 200, half go there and half come back."""
    asked: list[int] = []

    class Cost(CostModel):
        def collective_us(self, op: str, num_bytes: int, ranks: int) -> float:
            asked.append(num_bytes)
            return 1.0

    cost = Cost(**{name: getattr(COST, name) for name in COST.__dataclass_fields__})
    program = planned(*training(), cost=cost, until=2)
    table_bytes = WORDS * WIDTH * 4
    share = 12 * 2 / (2 * WORDS)
    (start,) = calls(program, op_info.ALL_REDUCE_ROWS)
    asked.clear()
    task_graph.comm_us(start, cost, {"0": 2})
    assert asked == [int(table_bytes * share)] == [768]
    asked.clear()
    planned(*training(), cost=cost, bucket_bytes=None)
    assert 768 in asked
    assert table_bytes not in asked


def test_the_step_without_communication_has_its_own_table():
    program = without_communication(planned(*training(), lowering=(AVERAGE, COPIES, FORM)))
    assert not any(op_info.is_collective(node) for node in program.graph.nodes)


def test_backends_say_how_many_rows_where_copies_reduce(monkeypatch):
    monkeypatch.setattr("wholestep.lower.kernels.copy_all_reduce.why_not", lambda group, device: "")
    monkeypatch.setattr(sparse_all_reduce, "LEAST_TABLE_BYTES", WORDS * WIDTH * 4)
    program = placed(*training())
    grads = [start.args[0] for start in calls(program, op_info.c10d.all_reduce.default)]
    backend = InductorBackend(InductorOptions(), torch.device("cpu"))
    backend.passes(program)
    assert {backend.wire_format(grad, "0").max_rows for grad in grads} == {0}
    backend._uses_copy_engines = True  # as on a GPU
    backend.passes(program)
    found = {node_meta.tensor(grad).shape[0]: backend.wire_format(grad, "0").max_rows for grad in grads}
    assert found == {WORDS: WORDS // 2, 5: 0}
    assert {backend.wire_format(grad, "1").max_rows for grad in grads} == {0}
