"""What holds for every pass, on random training steps; on random plain problems see ``tests/unit/passes``.

Outputs are the same bits, a pass is idempotent and leaves the collectives that it declares, nothing is read before its
wait, memory stays within the bound, and the whole gives what eager code gives on virtual ranks and on processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from tests.fuzz.random_steps import RandomStep, random_step
from tests.unit import builders
from tests.unit.capture.steps import captured
from wholestep.config import DDP
from wholestep.cost.cost_model import CostModel
from wholestep.cost.liveness import peak_bytes
from wholestep.ir import node_meta, op_info, printer
from wholestep.ir.program import MeshAxis, OutputKind, Program, Stage
from wholestep.ir.verifier import verify
from wholestep.lower.base import eager_backend
from wholestep.lower.inductor import segment_compiler
from wholestep.passes.analysis.task_graph import tasks_of
from wholestep.passes.default_passes import passes_of
from wholestep.passes.pass_manager import Pass, pass_name, run_passes
from wholestep.passes.schedule import segment_recompute
from wholestep.passes.schedule.form_segments import form_segments
from wholestep.passes.schedule.overlap import SLACK
from wholestep.passes.schedule.pack_scalars import pack_scalars
from wholestep.place.strategies import place

SEGMENTS = [
    partial(pack_scalars, reads=segment_compiler.reads_packed),
    partial(
        form_segments, compiles=segment_compiler.compiles, by_library=segment_compiler.is_library_call,
        cuts_repeats=True, is_pointwise=segment_compiler.is_pointwise,
    ),
]  # fmt: skip
"""Passes of a backend that compiles, as far as they keep the bits; the segments run node by node here."""
CALLS = [CostModel.default(name) for name in ("cpu+gloo", "h200+nvlink", "gpu+ethernet25")]
COSTS = CALLS + [replace(cost, compiles=segment_compiler.may_compile) for cost in CALLS]
"""Of calls as they are, and of a backend that makes kernels of them."""
PARTS = 4
"""Of one property, so that several workers can have a part: those seeds that leave the part's number as a remainder."""
draws = st.integers(0, 10**6)
many = settings(max_examples=32 // PARTS, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True, scope="module")
def _little_counts() -> Iterator[None]:
    """What is computed again in the place of being carried is small in these steps."""
    with patch.object(segment_recompute, "LEAST_BYTES", 1):
        yield


def placed(step: RandomStep) -> tuple[Program, list[Any]]:
    """The program of the step for a group of 2 that has this process alone, and inputs to run it on."""
    batch = step.batch(0)
    found = captured(step.run, *batch)
    axis = MeshAxis(name="data", size=2, group=builders.world_group())
    return place(found.program, DDP(), (axis,)), [*found.binding.fill(list(batch))]


def results(program: Program, inputs: list[Any]) -> list[Any]:
    """What the program returns, and its inputs as it leaves them."""
    torch.manual_seed(0)
    own = [one.detach().clone() if isinstance(one, Tensor) else one for one in inputs]
    with torch.no_grad():
        found = list(zip_longest(eager_backend.lower(program)(list(own)), program.outputs))
        returned = [one.clone() for one, end in found if end.kind is not OutputKind.WRITE and isinstance(one, Tensor)]
        for one, end in found:
            if end.kind is OutputKind.WRITE and one is not None:
                own[end.target].copy_(one.clone())
    return [*returned, *own]


@pytest.mark.parametrize("part", range(PARTS))
@many
@given(draw=draws, cost=st.sampled_from(COSTS), hold_updates=st.booleans(), lowering=st.sampled_from([[], SEGMENTS]))
def test_every_pass_keeps_the_bits_and_its_promises(
    part: int, draw: int, cost: CostModel, hold_updates: bool, lowering: list[Pass]
) -> None:
    step = random_step(PARTS * draw + part)
    program, inputs = placed(step)
    before_all, wanted = program, results(program, inputs)
    gradients = sorted(names_reduced(program))
    passes = passes_of(cost=cost, bucket_bytes=step.bucket_bytes, hold_updates=hold_updates, lowering=lowering)
    for one in passes:
        before = program
        program = run_passes(before, [one])  # verifies the stage: among others, nothing is read before its wait
        assert builders.same(results(program, inputs), wanted), pass_name(one)
        assert printer.diff(run_passes(program, [one]), program) == "", f"{pass_name(one)} is not idempotent"
        assert_collectives(one, before, program)
        if pass_name(one) == "overlap_communication":
            assert_bound(cost, before, program, hold_updates=hold_updates)
    assert program.stage is Stage.SCHEDULED
    # Ranks plan on their own: nothing may depend on the order of a set, on addresses or on time.
    assert printer.diff(run_passes(before_all, passes), program) == ""
    assert sorted(names_reduced(program)) == gradients
    verify(program)


def starts(program: Program) -> list[torch.fx.Node]:
    return [node for node in program.graph.nodes if op_info.is_collective(node)]


def names_reduced(program: Program) -> list[str]:
    return [name for node in starts(program) if (record := node_meta.bucket(node)) for name in record.members]


def assert_collectives(one: Pass, before: Program, after: Program) -> None:
    """Only CSE and bucketing may leave fewer; whatever there is moves the same gradients, of the same bytes."""
    if pass_name(one) in ("eliminate_common_subexpressions", "bucket_gradients"):
        assert len(starts(after)) <= len(starts(before))
    else:
        assert len(starts(after)) == len(starts(before))
    if pass_name(one) == "bucket_gradients":
        assert num_bucketed_bytes(after) == num_bucketed_bytes(before)


def num_bucketed_bytes(program: Program) -> int:
    return sum(node_meta.num_bytes(node) for node in starts(program) if node_meta.bucket(node) is not None)


def assert_bound(cost: CostModel, before: Program, after: Program, *, hold_updates: bool) -> None:
    peaks = []
    for program in (before, after):
        found = tasks_of(program, cost, hold_updates=hold_updates)
        peaks.append(peak_bytes(found.usages, pinned=found.pinned, writable=found.writable))
    assert peaks[1] <= int(peaks[0] * (1 + SLACK))


@pytest.mark.parametrize("seed", range(25))
def test_four_virtual_ranks(seed: int) -> None:
    """Optimised against unoptimised bit by bit, and against the eager step on the whole batch."""
    step = random_step(seed, dropout=seed % 3 == 0)
    strategy = DDP(bucket_bytes=step.bucket_bytes or "auto")
    rows = [step.batch(rank) for rank in range(4)]
    x, y = (torch.cat(parts) for parts in zip(*rows, strict=True))
    before = [one.detach().clone() for one in step.state()]
    found = ws.compile(step.run, strategy=strategy, fullgraph=True).verify(x, y, ranks=4, steps=2)
    assert found.ok, str(found)
    assert builders.same([one.detach() for one in step.state()], before)


def on_two_ranks(seed: int) -> None:
    """Three calls, compiled and under eager DDP, from the same state on the same data: the same bits."""
    ours, theirs = random_step(seed, dropout=False), random_step(seed, dropout=False)
    wrapped = DistributedDataParallel(theirs.model, find_unused_parameters=True)
    theirs.forward[0], theirs.accumulate[0] = wrapped, wrapped.no_sync
    step = ws.compile(ours.run, strategy=DDP(bucket_bytes=ours.bucket_bytes or "auto"), backend="eager", fullgraph=True)
    for call in range(3):
        batch = ours.batch(10 * call + dist.get_rank())
        results = [step(*batch), *ours.state()], [theirs.run(*batch), *theirs.state()]
        for own, other in zip(*results, strict=True):
            assert torch.equal(own, other), f"seed {seed}, call {call}"


@pytest.mark.parametrize("seed", range(25))
def test_two_processes(pool2: Any, seed: int) -> None:
    pool2.run(on_two_ranks, seed)
