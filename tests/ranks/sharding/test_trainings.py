"""Trainings under every sharded strategy, against eager DistributedDataParallel; and what travels in them.

`python -m benchmarks.sharded_trainings` runs the whole product. Here each strategy meets each model once, and each
optimizer, with and without clipping and accumulation.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from benchmarks.sharded_trainings.cell import OPTIMIZERS, WAYS, Cell, Outcome, outcome, run
from benchmarks.sharded_trainings.models import MODELS
from wholestep.config import Strategy
from wholestep.ir import node_meta, op_info

pytestmark = pytest.mark.ranks


def _covering() -> list[Cell]:
    cells = []
    for (i, way), (j, model) in itertools.product(enumerate(WAYS), enumerate(MODELS)):
        optimizer = [*OPTIMIZERS][(i + j) % len(OPTIMIZERS)]
        cells.append(Cell(way, model, optimizer, clips=(j + i // 2) % 2 == 1, accumulates=(i + j) // 2 % 2 == 1))
    return cells


CELLS = _covering()


def test_the_cells_meet_in_pairs() -> None:
    for way in WAYS:
        own = [cell for cell in CELLS if cell.way == way]
        assert {cell.optimizer for cell in own} == {*OPTIMIZERS}
        assert len({(cell.clips, cell.accumulates) for cell in own}) == 4


def is_the_same_arithmetic(cell: Cell) -> bool:
    """Sums of two are the same in any order. Norms are added by parts, and fused kernels round the ends otherwise."""
    return WAYS[cell.way].num_ranks == 2 and not cell.clips and cell.optimizer != "fused AdamW"


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_equals_eager_ddp(request: pytest.FixtureRequest, cell: Cell) -> None:
    pool = request.getfixturevalue(f"pool{WAYS[cell.way].num_ranks}")
    ranks: list[Outcome] = pool.run(run, cell)
    for one in ranks:
        assert one.faults == ()
        assert one.is_bitwise or not is_the_same_arithmetic(cell)


def in_one_bucket(cell: Cell, strategy: Strategy) -> Outcome:
    mesh = None
    if dist.get_world_size() == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    return outcome(cell, strategy, mesh)


ONE_BUCKET: dict[str, tuple[Strategy, dict[str, int]]] = {
    "ZeRO-1": (ws.ZeRO(), {"all_gather": 1, "reduce_scatter": 1}),
    "ZeRO-2": (ws.ZeRO(stage=2), {"all_gather": 1, "reduce_scatter": 1}),
    "FSDP, kept": (ws.FSDP(reshard_after_forward=False), {"all_gather": 1, "reduce_scatter": 1}),
    "FSDP, gathered again": (ws.FSDP(reshard_after_forward=True), {"all_gather": 2, "reduce_scatter": 1}),
    "HSDP 2x2": (ws.FSDP(reshard_after_forward=False), {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 1}),
}
"""What a step has where all fits into one bucket: B = 1 of the table in the study of sharding."""


@pytest.mark.parametrize("way", ONE_BUCKET)
@pytest.mark.parametrize(("clips", "accumulates"), [(False, False), (True, True)], ids=["plain", "clip-accumulate"])
def test_what_travels_in_one_bucket(request: pytest.FixtureRequest, way: str, clips: bool, accumulates: bool) -> None:
    """The norm is one all-reduce more. Two micro-batches reduce once, and gather again for each pass if they do."""
    strategy, wanted = ONE_BUCKET[way]
    cell = Cell(way, "MLP", "AdamW", clips, accumulates)
    found = request.getfixturevalue(f"pool{WAYS[way].num_ranks}").run(in_one_bucket, cell, strategy)[0]
    assert found.faults == ()
    wanted = wanted | ({"all_reduce": wanted.get("all_reduce", 0) + 1} if clips else {})
    assert found.kinds == wanted


@pytest.mark.parametrize("way", ["ZeRO-1", "ZeRO-2"])
def test_updated_parameters_are_gathered_in_the_buckets_of_their_gradients(pool2: Any, way: str) -> None:
    found: Outcome = pool2.run(run, Cell(way, "GPT", "SGD", clips=False, accumulates=False))[0]
    assert found.kinds["all_gather"] == found.kinds["reduce_scatter"] > 4


ZERO = {1: ws.ZeRO(), 2: ws.ZeRO(stage=2)}


@pytest.mark.parametrize("stage", ZERO)
def test_optimizer_state_is_cut_over_the_last_axis_of_two(pool4: Any, stage: int) -> None:
    cell = Cell(f"ZeRO-{stage}", "uneven sizes", "fused AdamW", clips=True, accumulates=False)
    for found in pool4.run(in_one_bucket, cell, ZERO[stage]):
        assert found.faults == ()
        assert found.kinds["all_reduce"] == 2  # of gradients over the replicas, and of the norm


class OtherLayouts(nn.Module):
    """Parameters whose elements lie in another order than their dims: channels last, and a transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
        self.weight = nn.Parameter(torch.randn(8, 6).t())
        self.head = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 4, 6, 6) to (rows, 6)."""
        features: Tensor = self.head(self.conv(x).mean((2, 3))) @ self.weight
        return features


def of_other_layouts(strategy: Strategy) -> tuple[list[str], list[str]]:
    """What differs from eager DDP, and collectives that are given something else than contiguous tensors."""
    world = ws.init()
    torch.manual_seed(0)
    ours = OtherLayouts().double().to(world.device)
    theirs = DistributedDataParallel(copy.deepcopy(ours))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (ours, theirs)]

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step = ws.compile(train_step, strategy=strategy, fullgraph=True)
    for call in range(3):
        x = torch.randn(4, 4, 6, 6, generator=torch.Generator().manual_seed(2 * call + world.rank))
        for one, *trained in zip((step, train_step), (ours, theirs), optimizers, strict=True):
            one(*trained, x.double().to(world.device))
    faults = []
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        whole = mine.full_tensor() if isinstance(mine, DTensor) else mine
        if not torch.allclose(whole, other, rtol=1e-9, atol=1e-9) or mine.stride() != other.stride():
            faults.append(name)
    sent = [one for node in step.program().graph.nodes if op_info.is_collective(node) for one in node.all_input_nodes]
    return faults, [one.name for one in sent if not node_meta.tensor(one).is_contiguous()]


@pytest.mark.parametrize("pool", ["pool2", pytest.param("nccl2", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("way", [way for way in ONE_BUCKET if way != "HSDP 2x2"])
def test_parameters_in_other_layouts_equal_eager_ddp(request: pytest.FixtureRequest, pool: str, way: str) -> None:
    for faults, sent in request.getfixturevalue(pool).run(of_other_layouts, ONE_BUCKET[way][0]):
        assert faults == []
        assert sent == []
