"""Trainings under every sharded strategy, against eager DistributedDataParallel; and what travels in them.

`python -m benchmarks.sharded_trainings` runs the whole product. Here each strategy meets each model once, and each
optimizer, with and without clipping and accumulation.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import wholestep as ws
from benchmarks.sharded_trainings.cell import OPTIMIZERS, WAYS, Cell, Outcome, outcome, run
from benchmarks.sharded_trainings.models import MODELS
from wholestep.config import Strategy

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
