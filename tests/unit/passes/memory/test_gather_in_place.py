"""Updated parameters are gathered into their own memory."""

from __future__ import annotations

import pytest

import wholestep as ws
from tests.unit.place.test_sharded import placed
from tests.unit.sharded_models import OPTIMIZERS
from wholestep.config import Strategy
from wholestep.cost.cost_model import CostModel
from wholestep.ir import op_info
from wholestep.ir.ops.collectives import ALL_GATHER_INTO
from wholestep.ir.program import OutputKind, Program
from wholestep.ir.verifier import verify
from wholestep.passes.default_passes import passes_of
from wholestep.passes.pass_manager import run_passes

COST = CostModel.default("cpu+gloo")


ZERO = ws.ZeRO()


def scheduled(
    width: int, *, hold_updates: bool = False, bucket_bytes: int | None = None,
    optimizer: str = "adamw_foreach", strategy: Strategy = ZERO,
) -> Program:  # fmt: skip
    program = placed(strategy, width=width, optimizer=optimizer)
    made = run_passes(program, passes_of(cost=COST, hold_updates=hold_updates, bucket_bytes=bucket_bytes))
    verify(made)
    return made


def copied(program: Program) -> str:
    notes = [note for record in program.history for note in record.notes]
    return next(note for note in notes if "copied at the end" in note)


def gathers(program: Program) -> list[object]:
    return [node.target for node in program.graph.nodes if op_info.is_collective(node) and "gather" in node.name]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", [ws.FSDP(), ws.FSDP(reshard_after_forward=True)], ids=repr)
def test_shards_are_updated_where_they_are(strategy: Strategy, optimizer: str) -> None:
    """Also where the backward gathers a parameter again, of which a decay could be computed any time before."""
    assert copied(scheduled(8, strategy=strategy, optimizer=optimizer)).startswith("0 B of inputs")


@pytest.mark.parametrize("bucket_bytes", [None, 1])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_nothing_is_copied(optimizer: str, bucket_bytes: int | None) -> None:
    program = scheduled(8, bucket_bytes=bucket_bytes, optimizer=optimizer)
    assert copied(program).startswith("0 B of inputs")
    assert set(gathers(program)) == {ALL_GATHER_INTO}
    writes = [end for end in program.outputs if end.kind is OutputKind.WRITE]
    results = zip(program.outputs, program.results, strict=True)
    assert [value for end, value in results if end.kind is OutputKind.WRITE] == [None] * len(writes)


def test_padded_parameters_are_copied_out_of_their_gather() -> None:
    program = scheduled(7)
    num_elements = 7 * 6 + 7 + 7 * 7 + 7  # parameters with an odd number of rows, float32
    assert copied(program).startswith(f"{4 * num_elements} B of inputs")
    assert set(gathers(program)) == {ALL_GATHER_INTO}


def test_held_updates_are_copied_behind_the_last_collective() -> None:
    program = scheduled(8, hold_updates=True)
    assert ALL_GATHER_INTO not in gathers(program)
    assert not copied(program).startswith("0 B")
