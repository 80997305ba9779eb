"""Gradients that travel in half precision and come back in float32: which, in which buckets, and the numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import nn

from tests.unit.capture.steps import captured
from tests.unit.passes.rewrites.test_matmul_out_dtype import AVERAGE, AXIS, COST, FORM, calls, run, step
from wholestep.cli.suite.no_comm_bound import _Silent, without_communication
from wholestep.config import DDP
from wholestep.config import Inductor as InductorOptions
from wholestep.cost import link_model
from wholestep.cost.cost_model import CostModel
from wholestep.ir import node_meta, op_info
from wholestep.ir.ops.collectives import ALL_REDUCE_BY_COPIES_, ALL_REDUCE_WIDE
from wholestep.ir.program import Program
from wholestep.lower.auto_backend import AutoBackend
from wholestep.lower.base.eager_backend import EagerBackend
from wholestep.lower.inductor import segment_compiler
from wholestep.lower.inductor_backend import InductorBackend
from wholestep.passes.analysis import task_graph
from wholestep.passes.analysis.alias_analysis import Memory
from wholestep.passes.comm.use_copy_engine import use_copy_engine
from wholestep.passes.comm.wire_dtype import narrow_dtype, narrow_wire_dtype
from wholestep.passes.comm.wire_format import WireFormat, unchanged
from wholestep.passes.default_passes import passes_of
from wholestep.passes.pass_manager import Pass, pass_name, run_passes
from wholestep.passes.rewrites.matmul_out_dtype import widen_matmul_out_dtype
from wholestep.place.strategies import place
from wholestep.runtime.verify import collective_semantics

aten = torch.ops.aten


def yes(node: fx.Node) -> bool:
    return True


def choose_wire_format(grad: fx.Node, group: str) -> WireFormat:
    return WireFormat(dtype=narrow_dtype(grad, supports=yes) or torch.float32)


COPIES: Pass = partial(use_copy_engine, why_not=lambda group, device: "")
NARROW: Pass = partial(narrow_wire_dtype, supports=yes)
WIDEN: Pass = partial(widen_matmul_out_dtype, widens=yes)


class Net(nn.Module):
    """Tokens of 40 -> an embedding of 16, a norm -> two linear layers of 64 and 40."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(40, 16)
        self.body = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 40))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.body(self.tokens(tokens))


NARROW_ELEMENTS = 16 * 64 + 64 * 40


@pytest.fixture
def training(monkeypatch) -> tuple[Any, ...]:
    monkeypatch.setattr("wholestep.passes.comm.use_copy_engine.MIN_BYTES", 0)
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.arange(40)


def planned(training: tuple[Any, ...], *lowering: Pass, until: int = 0, **options: Any) -> Program:
    placed = place(captured(step, *training).program, DDP(), (AXIS,))
    options = {"cost": COST, "bucket_bytes": 1 << 20, "choose_wire_format": choose_wire_format} | options
    passes = passes_of(lowering=lowering, **options)
    return run_passes(placed, passes[: len(passes) - until])


def test_products_travel_as_they_are_made_and_the_rest_in_float32(training):
    program = planned(training, AVERAGE, COPIES, NARROW, WIDEN, FORM)
    (wide,), (plain,) = calls(program, ALL_REDUCE_WIDE), calls(program, ALL_REDUCE_BY_COPIES_)
    assert node_meta.tensor(wide.args[0]).dtype is torch.bfloat16
    assert node_meta.tensor(wide).dtype is torch.float32
    assert node_meta.tensor(wide).numel() == NARROW_ELEMENTS
    assert wide.args[1:] == ("avg", torch.float32, "0")
    assert node_meta.bucket(wide).members == ("body.3.weight", "body.1.weight")
    assert node_meta.tensor(plain).dtype is torch.float32
    assert len(node_meta.bucket(plain).members) == 5
    notes = [note for record in program.history for note in record.notes]
    assert any(note.startswith("1 buckets travel as their products are: 7.0 KiB") for note in notes)


def test_products_write_half_as_many_bytes_to_their_slice_of_the_bucket(training):
    program = planned(training, AVERAGE, COPIES, NARROW, WIDEN, FORM)
    (wide,) = calls(program, ALL_REDUCE_WIDE)
    made = calls(program, aten.mm.dtype_out)
    assert [node.kwargs["out"].args[0] for node in made] == [wide.args[0]] * 2
    assert [node.args[2] for node in made] == [torch.bfloat16] * 2
    assert node_meta.tensor(wide.args[0]).nbytes == 2 * NARROW_ELEMENTS


def test_a_message_is_read_until_it_has_arrived(training):
    """So nobody overwrites it before, and its memory is free afterwards."""
    program = planned(training, AVERAGE, COPIES, NARROW, WIDEN, until=2)
    (wide,) = calls(program, ALL_REDUCE_WIDE)
    memory = Memory(program.graph)
    for node in program.graph.nodes:
        memory.enter(node)
    (wait,) = op_info.waits(wide)
    assert memory.read_later(wide.args[0], memory.position[wide]) is not None
    assert memory.read_later(wide.args[0], memory.position[wait]) is None


def test_numbers_are_those_of_casts_in_front_of_the_journey(training):
    """Products wider than their type would not be, as `test_wide` shows."""
    eager = run(planned(training, until=2), training)
    narrow = run(planned(training, AVERAGE, COPIES, NARROW, WIDEN, until=2), training)
    for one, other in zip(eager, narrow, strict=True):
        assert torch.equal(one, other)


def test_ranks_add_in_float32():
    values = [torch.randn(1000).bfloat16() for _ in range(3)]
    found = collective_semantics.RULES[ALL_REDUCE_WIDE]([(one, "avg", torch.float32, "0") for one in values])
    assert all(torch.equal(one, (values[0].float() + values[1].float() + values[2].float()) / 3) for one in found)


@pytest.mark.parametrize("change", ["one type", "no copies", "no such device"])
def test_other_buckets_stay_in_float32(training, change: str):
    """Those that hold other gradients, too, go by another way, or come from products that cannot be asked for."""
    if change == "one type":
        program = planned(training, AVERAGE, COPIES, NARROW, choose_wire_format=unchanged)
    elif change == "no copies":
        program = planned(training, AVERAGE, NARROW)
    else:
        program = planned(training, AVERAGE, COPIES, partial(narrow_wire_dtype, supports=segment_compiler.widens))
    assert not calls(program, ALL_REDUCE_WIDE)
    starts = [node for node in program.graph.nodes if op_info.is_collective(node)]
    assert starts
    assert all(node_meta.tensor(node).dtype is torch.float32 for node in starts)


def test_a_gradient_that_somebody_reads_is_of_no_type(training):
    """Before it is reduced, that is: afterwards it is in float32 like all."""
    placed = place(captured(step, *training).program, DDP(), (AXIS,))
    starts = calls(placed, op_info.c10d.all_reduce.default)
    types = [narrow_dtype(start.args[0].args[0], supports=yes) for start in starts]
    assert sorted(map(str, types)) == ["None"] * 5 + ["torch.bfloat16"] * 2
    grads = [start.args[0].args[0] for start, one in zip(starts, types, strict=True) if one is not None]
    with placed.graph.inserting_after(grads[0]):
        placed.graph.call_function(aten.neg.default, (grads[0],))
    assert narrow_dtype(grads[0], supports=yes) is None


def test_backends_say_the_type_where_copies_reduce(training, monkeypatch):
    monkeypatch.setattr("wholestep.lower.kernels.copy_all_reduce.why_not", lambda group, device: "")
    monkeypatch.setattr("wholestep.lower.inductor.segment_compiler.widens", yes)
    placed = place(captured(step, *training).program, DDP(), (AXIS,))
    grads = [start.args[0].args[0] for start in calls(placed, op_info.c10d.all_reduce.default)]

    def types(backend: Any, group: str = "0") -> list[torch.dtype]:
        return sorted((backend.wire_format(grad, group).dtype for grad in grads), key=str)

    plain = [torch.float32] * 7
    backend = InductorBackend(InductorOptions(), torch.device("cpu"))
    backend.passes(placed)
    assert types(backend) == types(EagerBackend()) == plain
    assert backend.costs(COST).links is COST.links
    auto = AutoBackend(torch.device("cpu"), lambda: COST, lambda why: why)
    assert types(auto) == plain
    backend._uses_copy_engines = True  # as on a GPU
    backend.passes(placed)
    assert types(backend) == [torch.bfloat16] * 2 + [torch.float32] * 5
    assert types(backend, "1") == plain
    assert backend.costs(COST).links.compute_slowdown == link_model.COPIES_COMPUTE_SLOWDOWN
    auto._chosen = backend
    assert types(auto) == types(backend)


def test_the_step_without_communication_makes_its_gradients_in_float32(training):
    silent = _Silent(InductorOptions(), torch.device("cpu"))
    placed = place(captured(step, *training).program, DDP(), (AXIS,))
    names = [pass_name(one) for one in silent.passes(placed)]
    assert narrow_wire_dtype.__name__ not in names
    assert len(names) == len(InductorBackend(InductorOptions(), torch.device("cpu")).passes(placed)) - 1
    program = without_communication(planned(training, AVERAGE, COPIES, WIDEN, FORM))
    assert not any(op_info.is_collective(node) for node in program.graph.nodes)
    assert len(calls(program, aten.mm.dtype_out)) == 2


def test_a_bucket_is_planned_by_what_travels(training):
    """Half as many bytes go there, and all come back: three quarters of a reduction."""
    asked: list[int] = []

    class Cost(CostModel):
        def collective_us(self, op: str, num_bytes: int, ranks: int) -> float:
            asked.append(num_bytes)
            return super().collective_us(op, num_bytes, ranks)

    cost = Cost(**{name: getattr(COST, name) for name in COST.__dataclass_fields__})
    program = planned(training, AVERAGE, COPIES, NARROW, WIDEN, FORM, cost=cost, bucket_bytes=None)
    (wide,) = calls(program, ALL_REDUCE_WIDE)
    assert 3 * NARROW_ELEMENTS in asked
    asked.clear()
    ranks = {axis.group: axis.size for axis in program.mesh}
    task_graph.comm_us(wide, cost, ranks)
    assert asked == [3 * NARROW_ELEMENTS]
