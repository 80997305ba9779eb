"""What every pass promises: a valid program, the same bits, the same collectives, and nothing left to do twice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.optim.adamw import adamw

from tests.unit import builders
from tests.unit.builders import c10d, gradient
from wholestep.cost.cost_model import CostModel
from wholestep.ir import op_info, printer
from wholestep.ir.program import Program, Stage
from wholestep.ir.verifier import verify
from wholestep.lower.inductor import segment_compiler
from wholestep.passes.comm.bucketing import bucket_gradients
from wholestep.passes.comm.split_optimizer import split_optimizer
from wholestep.passes.default_passes import passes_of
from wholestep.passes.memory.reinplace import reinplace
from wholestep.passes.pass_manager import Pass, run_passes
from wholestep.passes.rewrites.cse import eliminate_common_subexpressions
from wholestep.passes.rewrites.dead_code import eliminate_dead_code
from wholestep.passes.rewrites.fuse_cross_entropy import fuse_cross_entropy
from wholestep.passes.rewrites.pad_matmul import pad_matmul
from wholestep.passes.rewrites.padded_cross_entropy import pad_cross_entropy
from wholestep.passes.rewrites.rng_cleanup import clean_up_rng
from wholestep.passes.schedule.form_segments import form_segments
from wholestep.passes.schedule.overlap import overlap_communication
from wholestep.passes.schedule.pack_scalars import pack_scalars

CAP_BYTES = 100
COST = CostModel.default("cpu+gloo")
PACK: Pass = partial(pack_scalars, reads=segment_compiler.reads_packed)
SEGMENTS: Pass = partial(form_segments, compiles=segment_compiler.compiles)
PASSES: dict[str, list[Pass]] = {
    "dead_code": [eliminate_dead_code],
    "rng_cleanup": [clean_up_rng],
    "cse": [eliminate_common_subexpressions],
    "bucketing": [partial(bucket_gradients, cost=COST, bucket_bytes=CAP_BYTES)],
    "split_optimizer": [split_optimizer],
    "overlap": [partial(overlap_communication, cost=COST)],
    "fuse_cross_entropy": [fuse_cross_entropy],
    "pad_matmul": [partial(pad_matmul, pads=lambda product: True), pad_cross_entropy],
    "pack_scalars": [PACK],
    "form_segments": [SEGMENTS],
    "reinplace": [reinplace],
    "default": passes_of(cost=COST, bucket_bytes=CAP_BYTES),
    "segments": passes_of(cost=COST, bucket_bytes=CAP_BYTES, lowering=[PACK, SEGMENTS]),
}
WHOLE_LISTS = {"default", "segments"}
NUM_COLLECTIVES = {
    "foreach": {"placed": 3, "bucketing": 2, "default": 2, "segments": 2},
    "single": {"placed": 3, "bucketing": 2, "default": 2, "segments": 2},
    "statistics": {"placed": 3, "cse": 2, "default": 2, "segments": 2},
}
"""Collectives of a step as it is placed, and after the passes that declare to leave fewer."""


def train(foreach: bool) -> Callable[..., torch.Tensor]:
    """Two layers, dropout, clipping and AdamW; what a step looks like to the passes."""

    def step(*tensors: torch.Tensor) -> torch.Tensor:
        params, avgs, sqs, steps = (list(tensors[i : i + 3]) for i in (0, 3, 6, 9))
        x, lr = tensors[12:]
        leaves = [param.detach().requires_grad_() for param in params]
        hidden = torch.nn.functional.dropout(torch.relu(x @ leaves[0] + leaves[1]), 0.5, True)
        loss = (hidden @ leaves[2]).square().mean()
        grads = torch.autograd.grad(loss, leaves)
        grads = [gradient(grad, f"p{index}") for index, grad in enumerate(grads)]
        with torch.no_grad():
            norm = torch.stack([grad.norm() for grad in grads]).norm()
            torch._foreach_mul_(grads, torch.clamp(1.0 / (norm + 1e-6), max=1.0))
            adamw(
                params, grads, avgs, sqs, [], steps, foreach=foreach, amsgrad=False, beta1=0.9, beta2=0.999,
                lr=lr.item(), weight_decay=0.01, eps=1e-8, maximize=False,
            )  # fmt: skip
        return loss.detach()

    return step


def statistics(mean: torch.Tensor, count: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Buffers written in the forward, the same collective twice, a random number, and no optimizer."""
    group = builders.world_group()
    mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
    count.add_(1)
    one = op_info.WAIT(c10d.all_reduce.default(x, "sum", group))
    two = op_info.WAIT(c10d.all_reduce.default(x, "sum", group))
    return one.t().t() + torch.rand(3), gradient(two * 2, "x")


def train_tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(6, 4), (4,), (4, 2)]
    state = [torch.rand(shape, generator=generator) for _ in range(3) for shape in shapes]
    steps = [torch.tensor(3.0) for _ in shapes]
    return [*state, *steps, torch.rand(5, 6, generator=generator), torch.tensor(1e-2, dtype=torch.float64)]


STEPS = {
    "foreach": (train(True), train_tensors()),
    "single": (train(False), train_tensors()),
    "statistics": (statistics, [torch.zeros(3), torch.tensor(4), torch.rand(5, 3)]),
}


@pytest.fixture(scope="module", params=STEPS)
def step(request: pytest.FixtureRequest) -> str:
    """The name of a step."""
    return str(request.param)


@pytest.fixture(scope="module")
def placed(step: str) -> tuple[Program, list[torch.Tensor]]:
    """The placed program of the step, and tensors to run it on."""
    fn, tensors = STEPS[step]
    return builders.place(builders.capture(fn, tensors)), tensors


def run(program: Program, tensors: list[torch.Tensor]) -> tuple[list, list[torch.Tensor]]:
    torch.manual_seed(5)
    return builders.execute(program, tensors)


@pytest.mark.parametrize("name", PASSES)
def test_the_program_stays_valid(name, placed):
    verify(run_passes(placed[0], PASSES[name]))


@pytest.mark.parametrize("name", PASSES)
def test_the_bits_stay_the_same(name, placed):
    program, tensors = placed
    assert builders.same(run(run_passes(program, PASSES[name]), tensors), run(program, tensors))


@pytest.mark.parametrize("name", sorted(PASSES.keys() - WHOLE_LISTS))
def test_a_second_time_changes_nothing(name, placed):
    once = run_passes(placed[0], PASSES[name])
    assert printer.diff(once, run_passes(once, PASSES[name])) == ""


@pytest.mark.parametrize("name", PASSES)
def test_collectives_do_not_get_lost_or_more(name, step, placed):
    expected = NUM_COLLECTIVES[step]
    assert builders.count(placed[0], *op_info.COLLECTIVES) == expected["placed"]
    after = run_passes(placed[0], PASSES[name])
    assert builders.count(after, *op_info.COLLECTIVES) == expected.get(name, expected["placed"])
    assert builders.count(after, op_info.WAIT) == builders.count(after, *op_info.COLLECTIVES)


@pytest.mark.parametrize("name", PASSES)
def test_every_gradient_is_reduced_once(name, placed):
    plans = [printer.plan_text(one) for one in (placed[0], run_passes(placed[0], PASSES[name]))]
    members = [
        sorted(
            name for line in plan.splitlines() if "members: " in line for name in line.split("members: ")[1].split(", ")
        )
        for plan in plans
    ]
    assert members[0] == members[1] != []


@pytest.mark.parametrize("name", PASSES)
def test_the_program_that_went_in_is_not_touched(name, placed):
    text = printer.source(placed[0])
    run_passes(placed[0], PASSES[name])
    assert printer.source(placed[0]) == text


@pytest.mark.parametrize("name", PASSES)
def test_the_same_program_gives_the_same_text(name, placed):
    """Ranks compare plans by text, and run passes on their own: nothing may depend on the order of a set."""
    assert printer.diff(run_passes(placed[0], PASSES[name]), run_passes(placed[0], PASSES[name])) == ""


def test_the_default_list_ends_scheduled(placed):
    after = run_passes(placed[0], passes_of(cost=COST, bucket_bytes=CAP_BYTES))
    assert after.stage is Stage.SCHEDULED
    assert [record.name for record in after.history] == [
        "eliminate_dead_code", "clean_up_rng", "eliminate_common_subexpressions", "bucket_gradients", "bucket_gathers",
        "split_optimizer", "start_gathers_early", "overlap_communication", "reinplace", "grads_as_bucket_views",
    ]  # fmt: skip
