"""The predicted peak of memory is what a run of the scheduled graph keeps alive; categories mean what they say."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.unit.builders import LiveBytes
from tests.unit.capture.steps import Blocks, captured, train
from wholestep.api.report.prediction import predict
from wholestep.config import DDP
from wholestep.cost.cost_model import CostModel
from wholestep.ir import node_meta
from wholestep.ir.program import InputKind, MeshAxis, Program
from wholestep.lower.base.eager_backend import lower
from wholestep.passes.default_passes import passes_of
from wholestep.passes.pass_manager import run_passes
from wholestep.place.strategies import place

COST = CostModel.default("cpu+gloo")
OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


@pytest.fixture(scope="module", autouse=True)
def axis() -> Iterator[MeshAxis]:
    """Two ranks, of which this one is there; messages stay what they are."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield MeshAxis(name="data", size=2, group=dist.group.WORLD.group_name)  # type: ignore[union-attr]
    dist.destroy_process_group()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("ranks", "rows"), [(1, 64), (2, 64), (1, 2), (2, 2)])
def test_the_predicted_peak_is_what_a_run_keeps_alive(ranks: int, rows: int, optimizer: str, axis: MeshAxis) -> None:
    """To the byte: in the backward with many rows, in the update with few."""
    model = Blocks(depth=3, width=32)
    x = torch.randn(rows, 32)
    opt = OPTIMIZERS[optimizer](model.parameters())
    trace = captured(train, model, opt, x)
    program = _scheduled(place(trace.program, DDP(bucket_bytes=20_000), (axis,) if ranks > 1 else ()))
    peak = predict(program, COST).peak
    inputs = trace.binding.fill([model, opt, x])
    input_bytes = sum(map(node_meta.num_bytes, program.placeholders))
    with LiveBytes() as live, torch.no_grad():
        live.know([one for one in inputs if isinstance(one, torch.Tensor)])
        lower(program)(inputs)
    assert peak.num_bytes - input_bytes == live.peak
    assert peak.by_category["parameters"] == sum(4 * one.numel() for one in model.parameters())
    pairs = zip(program.placeholders, program.inputs, strict=True)
    assert peak.by_category["optimizer state"] == sum(
        node_meta.num_bytes(node) for node, record in pairs if record.kind is InputKind.OPTIMIZER
    )


def test_gradients_and_buckets_are_told_apart(axis: MeshAxis) -> None:
    """One bucket of everything: it is as large as the parameters."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    program = run_passes(
        place(captured(train, model, opt, torch.randn(2, 64)).program, DDP(), (axis,)),
        passes_of(cost=COST, bucket_bytes=1 << 30),
    )
    peak = predict(program, COST).peak
    params_bytes = 4 * 4 * 64 * 64
    assert peak.by_category["parameters"] == params_bytes
    assert peak.by_category["buckets"] == params_bytes
    assert 0 <= peak.by_category["gradients"] <= params_bytes
    assert peak.by_category["activations"] < 20_000


def test_on_one_rank_what_updates_read_are_gradients() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    program = _scheduled(place(captured(train, model, opt, torch.randn(2, 64)).program, None, ()))
    by_category = predict(program, COST).peak.by_category
    assert by_category["buckets"] == 0
    assert by_category["gradients"] == 4 * 4 * 64 * 64


def _scheduled(program: Program) -> Program:
    return run_passes(program, passes_of(cost=COST, bucket_bytes=20_000))
