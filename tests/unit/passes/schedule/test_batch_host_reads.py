"""read_in_rounds: the host reads all numbers that it needs of the GPU at once. On fake tensors, run on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.unit import builders
from tests.unit.builders import aten
from tests.unit.lower.gpu_programs import Spec, captured, gpu, host
from wholestep.ir import op_info
from wholestep.ir.ops.packed_scalars import element, pack
from wholestep.ir.program import InputKind, Program
from wholestep.lower.base import eager_backend
from wholestep.lower.cudagraph.partition import Partition, partition
from wholestep.lower.inductor import segment_compiler
from wholestep.passes.memory.reinplace import reinplace
from wholestep.passes.pass_manager import run_passes
from wholestep.passes.schedule.batch_host_reads import FEWEST_READS, batch_host_reads
from wholestep.passes.schedule.form_segments import form_segments
from wholestep.passes.schedule.pack_scalars import pack_scalars

ITEM, COPY, MM = aten._local_scalar_dense.default, aten._to_copy.default, aten.mm.default
PARAM = InputKind.PARAM


def adapts(count: int, rate: Tensor, *tensors: Tensor) -> tuple[Any, ...]:
    """An update by a number of the gradient's own, as Adafactor has it."""
    news = []
    for w, g in zip(tensors[:count], tensors[count:], strict=True):
        norm = (g @ g).square().sum().item()
        news.append(w - g * (rate.item() / (1.0 + norm)))
    return tuple(news)


def program_of(fn: Callable[..., Any], *specs: Spec) -> Program:
    return builders.without_gradients(captured(fn, specs))


def adapting(count: int) -> Program:
    return program_of(partial(adapts, count), host(), *[gpu(3, 3)] * (2 * count))


def calls(program: Program) -> list[Any]:
    return [node.target for node in program.graph.nodes if node.op == "call_function"]


PACK = partial(pack_scalars, reads=segment_compiler.reads_packed)


def run(program: Program, inputs: Sequence[Tensor]) -> list[Any]:
    program = run_passes(program, [reinplace])
    for node in program.graph.find_nodes(op="call_function", target=pack):
        node.args = (node.args[0], torch.device("cpu"))
    with torch.no_grad():
        return list(eager_backend.lower(program)([one.clone() for one in inputs]))


def inputs(count: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.tensor(0.1, dtype=torch.float64), *(torch.rand(3, 3, generator=draw) for _ in range(2 * count))]


def test_one_turn_of_the_host_in_the_place_of_many():
    before = adapting(6)
    after = run_passes(before, [batch_host_reads])
    found = calls(after)
    assert found.count(ITEM) == calls(before).count(ITEM)
    assert found.count(COPY) == 1
    first, last = found.index(COPY), len(found) - 1 - found[::-1].index(ITEM)
    assert MM not in found[first:]
    assert not {aten.mul.Tensor, aten.sub.Tensor} & {*found[:last]}
    assert after.history[-1].notes == ("the host reads 6 numbers of the GPU in 1 rounds, and not in 6",)
    assert builders.same(run(before, inputs(6)), run(after, inputs(6)))


def test_numbers_travel_back_together():
    """What comes after the host's turn is captured as one graph then."""
    program = run_passes(adapting(6), [batch_host_reads, PACK])
    (packed,) = program.graph.find_nodes(op="call_function", target=pack)
    assert len(packed.args[0]) == 6
    assert calls(program).count(element) == 6
    assert builders.same(run(adapting(6), inputs(6)), run(program, inputs(6)))
    formed = [partial(form_segments, compiles=segment_compiler.compiles), reinplace]
    parts = partition(run_passes(program, formed))
    assert isinstance(parts, Partition)
    assert [piece.captured for piece in parts.pieces] == [True, False, True]
    found = [node.target for node in parts.pieces[1].program.graph.nodes if node.op == "call_function"]
    assert found.count(ITEM) == 6
    assert found[-1] is pack


def test_without_rounds_every_number_travels_by_itself():
    """Which is right, too: after the turn in which it is made."""
    program = run_passes(adapting(3), [PACK])
    assert calls(program).count(pack) == 3
    assert builders.same(run(adapting(3), inputs(3)), run(program, inputs(3)))


def test_numbers_of_numbers_take_a_round_each():
    def step(rate: Tensor, *tensors: Tensor) -> tuple[Any, ...]:
        found = []
        for one in tensors:
            once = one * (rate.item() / (1.0 + one.sum().item()))
            found.append(once * (1.0 / (1.0 + once.amax().item())))
        return tuple(found)

    before = program_of(step, host(), *[gpu(3, 3)] * 4)
    after = run_passes(before, [batch_host_reads, PACK])
    assert "the host reads 8 numbers of the GPU in 2 rounds, and not in 8" in after.history[0].notes
    assert calls(after).count(pack) == 2
    assert builders.same(run(before, inputs(2)), run(after, inputs(2)))


def test_few_reads_are_left_alone():
    program = adapting(FEWEST_READS - 1)
    assert batch_host_reads(program) is program
    program = adapting(FEWEST_READS)
    assert batch_host_reads(program) is not program


def test_draws_keep_their_order():
    def step(*tensors: Tensor) -> tuple[Any, ...]:
        found = []
        for one in tensors:
            number = one.sum().item()
            found.append(torch.bernoulli(one) * number)
            found.append(aten.rand_like.default(found[-1]))
        return tuple(found)

    before = program_of(step, *[gpu(3, 3)] * 5)
    after = run_passes(before, [batch_host_reads])
    drawn = [[one for one in calls(program) if op_info.is_random(one)] for program in (before, after)]
    assert drawn[0] == drawn[1]
    states = []
    for program in before, after:
        torch.manual_seed(0)
        states.append(run(program, inputs(3)[1:6]))
    assert builders.same(*states)


def test_numbers_of_several_types_travel_apart():
    def step(*tensors: Tensor) -> tuple[Any, ...]:
        return tuple(one * one.sum().item() for one in tensors)

    specs = [gpu(3, 3), gpu(3, 3, dtype=torch.float64)] * 3
    before = program_of(step, *specs)
    after = run_passes(before, [batch_host_reads])
    assert calls(after).count(COPY) == 2
    values = [torch.rand(shape, dtype=dtype) for shape, dtype, _, _ in specs]
    assert builders.same(run(before, values), run(after, values))


def test_scheduled_programs_keep_their_order():
    program = run_passes(adapting(6), [reinplace])
    assert batch_host_reads(program) is program
